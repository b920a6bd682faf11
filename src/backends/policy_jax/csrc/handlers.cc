/* XLA FFI handlers that serve every product with quantized weights, by policy_kernels.
 *
 * A packed weight is an array [panels, bytes of a panel] of uint8.
 *
 * policy_jax_unpack gives codes [n, k] for a packed weight; attributes n, k and code as below.
 *
 * policy_jax_encode gives float8 codes [..., k] for x [..., k] float32 and its scales, one a row or
 * one for all; attribute code.
 *
 * policy_jax_linear has these operands: x [..., k]; for linear_f8 its scales, one a row or one for
 * all; the weight, packed or codes [n, k]; the weight's scales, one a channel or one for all; maybe
 * a bias [n]. Result: y [..., n]. Attributes, all int64: operation, n, k, code (a pk_format: what
 * the weight holds).
 */
#include <string.h>

#include "executor.h"
#include "policy_kernels.h"
#include "xla_ffi.h"

using namespace xla_ffi;

namespace {

/* The kernels' functions, given by policy_jax_bind: the library that has them is loaded already. */
struct Functions {
  decltype(&pk_last_error) last_error;
  decltype(&pk_packed_bytes) packed_bytes;
  decltype(&pk_pack) pack;
  decltype(&pk_unpack) unpack;
  decltype(&pk_encode_rows_f8) encode_rows_f8;
  decltype(&pk_linear_s8) linear_s8;
  decltype(&pk_linear_s8w) linear_s8w;
  decltype(&pk_linear_f8) linear_f8;
  decltype(&pk_linear_f8w) linear_f8w;
};

Functions kernels;

enum Operation { kLinearS8 = 0, kLinearS8w = 1, kLinearF8 = 2, kLinearF8w = 3 };

Error* failure(const CallFrame* frame, int code, const char* message) {
  Error_Create_Args args = {sizeof(args), nullptr, message, code};
  return frame->api->Error_Create(&args);
}

int64_t attribute(const Attrs& attrs, const char* name) {
  for (int64_t i = 0; i < attrs.size; ++i) {
    const ByteSpan* found = attrs.names[i];
    if (attrs.types[i] == kAttrScalar && found->len == strlen(name) &&
        memcmp(found->ptr, name, found->len) == 0) {
      const Scalar* scalar = static_cast<const Scalar*>(attrs.attrs[i]);
      if (scalar->dtype == kS64) return *static_cast<const int64_t*>(scalar->value);
    }
  }
  return -1;
}

int64_t elements(const Buffer* buffer) {
  int64_t product = 1;
  for (int64_t i = 0; i < buffer->rank; ++i) product *= buffer->dims[i];
  return product;
}

int64_t rows(const Buffer* buffer) {
  int64_t product = 1;
  for (int64_t i = 0; i + 1 < buffer->rank; ++i) product *= buffer->dims[i];
  return product;
}

/* The pk_dtype of floats, or -1. */
pk_dtype float_dtype(const Buffer* buffer) {
  if (buffer == nullptr || buffer->dtype == kF32) return PK_FLOAT32;
  if (buffer->dtype == kBF16) return PK_BFLOAT16;
  return buffer->dtype == kF16 ? PK_FLOAT16 : -1;
}

/* A weight as the kernels read it: as it is where it is packed and its address is a multiple of 64,
 * as XLA's buffers are; else in a block of its own. */
class Weight {
 public:
  ~Weight() { free(owned_); }

  /* NULL with a reason. */
  const void* prepare(const Buffer* given, pk_format code, int64_t n, int64_t k,
                      const char** reason) {
    int64_t bytes = 0, one_panel = 0, two_panels = 0;
    *reason = "there is no memory for the packed weight";
    if (kernels.packed_bytes(n, k, &bytes) != PK_OK ||
        kernels.packed_bytes(32, k, &one_panel) != PK_OK ||
        kernels.packed_bytes(64, k, &two_panels) != PK_OK) {
      return wrong(reason, kernels.last_error());
    }
    const bool packed = given->dtype == kU8;
    const int64_t panels_bytes = (n + 31) / 32 * (two_panels - one_panel);
    if (elements(given) != (packed ? panels_bytes : n * k)) {
      return wrong(reason, "policy_jax: expected the weight to have the size of its n and k");
    }
    if (packed && reinterpret_cast<uintptr_t>(given->data) % 64 == 0) return given->data;
    if (posix_memalign(&owned_, 64, static_cast<size_t>(bytes)) != 0) {
      owned_ = nullptr;
      return nullptr;
    }
    if (packed) {
      memcpy(owned_, given->data, static_cast<size_t>(panels_bytes));
    } else if (kernels.pack(code, n, k, given->data, k, owned_) != PK_OK) {
      return wrong(reason, kernels.last_error());
    }
    return owned_;
  }

 private:
  static const void* wrong(const char** reason, const char* message) {
    *reason = message;
    return nullptr;
  }

  void* owned_ = nullptr;
};

Error* unpack(const CallFrame* frame) {
  const int64_t n = attribute(frame->attrs, "n"), k = attribute(frame->attrs, "k");
  const pk_format code = static_cast<pk_format>(attribute(frame->attrs, "code"));
  if (kernels.pack == nullptr || n < 0 || k < 0 || frame->args.size != 1 || frame->rets.size != 1 ||
      elements(static_cast<const Buffer*>(frame->rets.rets[0])) != n * k) {
    return failure(frame, kInvalidArgument, "policy_jax: expected a call that policy_jax made");
  }
  const char* reason = nullptr;
  Weight weight;
  const void* w =
      weight.prepare(static_cast<const Buffer*>(frame->args.args[0]), code, n, k, &reason);
  if (w == nullptr) return failure(frame, kInvalidArgument, reason);
  void* codes = static_cast<const Buffer*>(frame->rets.rets[0])->data;
  if (kernels.unpack(code, n, k, w, codes, k) == PK_OK) return nullptr;
  return failure(frame, kInternal, kernels.last_error());
}

Error* encode(const CallFrame* frame) {
  const pk_format code = static_cast<pk_format>(attribute(frame->attrs, "code"));
  if (kernels.pack == nullptr || frame->args.size != 2 || frame->rets.size != 1) {
    return failure(frame, kInvalidArgument, "policy_jax: expected a call that policy_jax made");
  }
  const Buffer* x = static_cast<const Buffer*>(frame->args.args[0]);
  const Buffer* scale = static_cast<const Buffer*>(frame->args.args[1]);
  const Buffer* codes = static_cast<const Buffer*>(frame->rets.rets[0]);
  const int64_t m = rows(x), k = x->rank > 0 ? x->dims[x->rank - 1] : 1;
  if (x->dtype != kF32 || elements(codes) != m * k ||
      (elements(scale) != m && elements(scale) != 1)) {
    return failure(frame, kInvalidArgument, "policy_jax: expected sizes that agree");
  }
  const XlaExecutor executor(frame);
  const PlainRounding rounding;
  const pk_status status =
      kernels.encode_rows_f8(executor.get(), code, m, k, static_cast<const float*>(x->data), k,
                             static_cast<const float*>(scale->data), elements(scale) == m ? 1 : 0,
                             static_cast<uint8_t*>(codes->data), k);
  return status == PK_OK ? nullptr : failure(frame, kInternal, kernels.last_error());
}

Error* linear(const CallFrame* frame) {
  const int64_t operation = attribute(frame->attrs, "operation");
  const int64_t n = attribute(frame->attrs, "n"), k = attribute(frame->attrs, "k");
  const pk_format code = static_cast<pk_format>(attribute(frame->attrs, "code"));
  const int64_t scaled = operation == kLinearF8 ? 1 : 0;
  const int64_t operands = frame->args.size - scaled;
  if (kernels.pack == nullptr || operation < kLinearS8 || operation > kLinearF8w || n < 0 ||
      k < 0 || operands < 3 || operands > 4 || frame->rets.size != 1) {
    return failure(frame, kInvalidArgument, "policy_jax: expected a call that policy_jax made");
  }
  const Buffer* const* given = reinterpret_cast<const Buffer* const*>(frame->args.args);
  const Buffer* x = given[0];
  const Buffer* x_scale = scaled ? given[1] : nullptr;
  const Buffer* scale = given[2 + scaled];
  const Buffer* bias = operands == 4 ? given[3 + scaled] : nullptr;
  const Buffer* y = static_cast<const Buffer*>(frame->rets.rets[0]);
  const int64_t m = rows(x);
  if (x->rank < 1 || x->dims[x->rank - 1] != k || elements(y) != m * n ||
      (elements(scale) != n && elements(scale) != 1) || (bias != nullptr && elements(bias) != n) ||
      (x_scale != nullptr && elements(x_scale) != m && elements(x_scale) != 1)) {
    return failure(frame, kInvalidArgument, "policy_jax: expected sizes that agree with n and k");
  }
  const char* reason = nullptr;
  Weight weight;
  const void* w = weight.prepare(given[1 + scaled], code, n, k, &reason);
  if (w == nullptr) return failure(frame, kInvalidArgument, reason);
  const XlaExecutor executor(frame);
  const PlainRounding rounding;
  const float* w_scale = static_cast<const float*>(scale->data);
  const int64_t w_stride = elements(scale) == n ? 1 : 0;
  const pk_dtype x_dtype = float_dtype(x), y_dtype = float_dtype(y), b_dtype = float_dtype(bias);
  const void* b = bias == nullptr ? nullptr : bias->data;
  pk_status status = PK_ERR_UNSUPPORTED;
  switch (operation) {
    case kLinearS8:
      status = kernels.linear_s8(executor.get(), m, n, k, x_dtype, x->data, k, w, w_scale, b_dtype,
                                 b, y_dtype, y->data, n);
      break;
    case kLinearS8w:
      status = kernels.linear_s8w(executor.get(), m, n, k, x_dtype, x->data, k, w, w_scale, b_dtype,
                                  b, y_dtype, y->data, n);
      break;
    case kLinearF8:
      status = kernels.linear_f8(
          executor.get(), m, n, k, x->dtype == kF8E5M2 ? PK_F8_E5M2 : PK_F8_E4M3FN,
          static_cast<const uint8_t*>(x->data), k, static_cast<const float*>(x_scale->data),
          elements(x_scale) == m ? 1 : 0, code, w, w_scale, w_stride, b_dtype, b, y_dtype, y->data,
          n);
      break;
    case kLinearF8w:
      status = kernels.linear_f8w(executor.get(), m, n, k, x_dtype, x->data, k, code, w, w_scale,
                                  w_stride, b_dtype, b, y_dtype, y->data, n);
      break;
  }
  return status == PK_OK ? nullptr : failure(frame, kInternal, kernels.last_error());
}

}  // namespace

extern "C" {

/* The version of the kernels' interface that this was compiled for. */
PK_API int32_t policy_jax_abi_version() { return PK_ABI_VERSION; }

/* Takes the kernels' functions, in the order of Functions. */
PK_API void policy_jax_bind(void* const* functions) {
  memcpy(&kernels, functions, sizeof(kernels));
}

static Error* answer(CallFrame* frame, Error* (*execute)(const CallFrame*)) {
  const Extension_Base* extension = frame->extension_start;
  if (extension != nullptr && extension->type == kExtensionMetadata) {
    Metadata* metadata = reinterpret_cast<const Metadata_Extension*>(extension)->metadata;
    metadata->api_version.major_version = kApiMajor;
    metadata->api_version.minor_version = kApiMinor;
    metadata->traits = 0;
    return nullptr;
  }
  return frame->stage == kStageExecute ? execute(frame) : nullptr;
}

PK_API Error* policy_jax_linear(CallFrame* frame) { return answer(frame, linear); }
PK_API Error* policy_jax_encode(CallFrame* frame) { return answer(frame, encode); }
PK_API Error* policy_jax_unpack(CallFrame* frame) { return answer(frame, unpack); }

}  // extern "C"
