/* TensorFlow operators for every product with quantized weights, computed by policy_kernels.
 *
 * The operators' names begin with what a process must do that loads a program with them, because
 * TensorFlow's error names nothing else. They end with the version of the kernels' interface: two
 * versions in one process do not meet.
 *
 *   Linear        x [..., k], x_scale, weight, scale [n], bias [n] or [0] -> y [..., n]
 *                 weight: packed bytes [b], or codes [n, k], which each call packs
 *                 linear_f8: x float32 with x_scale [] (one for all) or [0] (one a row, from x); or
 *                 codes of x_code, with x_scale [] or one a row, [...]
 *                 other operations: x floats, x_scale [0]
 *   Encode        x [...], scale [] -> codes [...]
 *   QuantizeRows  x [..., k] -> codes [..., k], scale [...]
 *   Pack          codes [n, k] -> packed [b]
 *   Unpack        packed [b] -> codes [n, k]
 *   Rows          ids [...], packed [b], scale [n] -> y [..., k]
 *
 * Codes are bytes (uint8) whatever they mean; `code` and `x_code` are a pk_format.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "plain_rounding.h"
#include "policy_kernels.h"
#include "shapes.h"

namespace {

/* Of the operators' names, which saved programs hold: new arguments or a new packed form add 1. */
#define POLICY_OPERATORS_VERSION 1
#define POLICY_STRING(x) #x
#define POLICY_EXPANDED(x) POLICY_STRING(x)
#define POLICY_OP(name) "ImportPolicyCore>" name "V" POLICY_EXPANDED(POLICY_OPERATORS_VERSION)

/* Why nothing was registered; "" if all was. */
char problem[512];

enum Operation { kLinearS8 = 0, kLinearS8w = 1, kLinearF8 = 2, kLinearF8w = 3 };

/* What a node is made with. */
struct Attributes {
  int64_t operation = 0, code = 0, x_code = 0, n = 0, k = 0;
};

/* The codes and scales of floats: under one scale where x_scale is [], else one a row. */
void encode_rows(Call* call, const Tensor& x, const Tensor& x_scale, uint8_t* codes,
                 float* scales) {
  const int64_t m = x.rows(), k = x.last(), stride = at_least_1(k);
  if (x_scale.rank() == 0) {
    scales[0] = x_scale.floats()[0];
    call->check(kernels.encode_rows_f8(nullptr, PK_F8_E4M3FN, m, k, x.floats(), stride, scales, 0,
                                       codes, stride));
  } else {
    call->check(
        kernels.quantize_rows_f8(PK_F8_E4M3FN, m, k, x.floats(), stride, codes, stride, scales));
  }
}

void linear(void* made, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<const Attributes*>(made);
  const PlainRounding rounding;
  Call call(context);
  Tensor x, x_scale, weight, scale, bias, y;
  if (!call.input(0, &x) || !call.input(1, &x_scale) || !call.input(2, &weight) ||
      !call.input(3, &scale) || !call.input(4, &bias) || !bound(&call)) {
    return;
  }
  if (!call.expect(x.rank() >= 1 && x.rank() <= kMaxRank,
                   "policy_tensorflow: expected x to have shape [..., k], of at most 32 axes") ||
      !call.expect(scale.rank() == 1, "policy_tensorflow: expected scale to have shape [n]")) {
    return;
  }
  const int64_t operation = attributes.operation;
  const int64_t m = x.rows(), k = x.last(), n = scale.dim(0);
  const pk_format code = static_cast<pk_format>(attributes.code);
  const pk_dtype x_dtype = float_dtype(x.type());
  const bool is_codes = x.type() == static_cast<TF_DataType>(kUint8);
  const bool rowwise = x_scale.rank() > 0 && x_scale.elements() == m && is_codes;
  if (!call.expect(bias.rank() == 1 && (bias.dim(0) == n || bias.dim(0) == 0),
                   "policy_tensorflow: expected bias to have shape [n] or [0]") ||
      !call.expect(!is_codes || operation == kLinearF8,
                   "policy_tensorflow: expected x to be floats for this operation") ||
      !call.expect(is_codes || operation != kLinearF8 || x_dtype == PK_FLOAT32,
                   "policy_tensorflow: expected x to be float32 or codes for this operation") ||
      !call.expect(!is_codes || rowwise || x_scale.rank() == 0,
                   "policy_tensorflow: expected x_scale to have one value, or one for each row")) {
    return;
  }
  Weight prepared;
  const void* w = prepared.prepare(&call, weight, code, n, k);
  if (w == nullptr) return;
  int64_t dims[kMaxRank];
  for (int i = 0; i < x.rank(); ++i) dims[i] = x.dim(i);
  dims[x.rank() - 1] = n;
  const TF_DataType y_type = call.output_type(0);
  if (!call.output(0, x.rank(), dims, float_bytes(y_type), &y)) return;
  const pk_dtype y_dtype = float_dtype(y_type), b_dtype = float_dtype(bias.type());
  const void* b = bias.dim(0) == n && n > 0 ? bias.data() : nullptr;
  const int64_t ldx = at_least_1(k), ldy = at_least_1(n);
  switch (operation) {
    case kLinearS8:
      call.check(kernels.linear_s8(nullptr, m, n, k, x_dtype, x.data(), ldx, w, scale.floats(),
                                   b_dtype, b, y_dtype, y.data(), ldy));
      break;
    case kLinearS8w:
      call.check(kernels.linear_s8w(nullptr, m, n, k, x_dtype, x.data(), ldx, w, scale.floats(),
                                    b_dtype, b, y_dtype, y.data(), ldy));
      break;
    case kLinearF8w:
      call.check(kernels.linear_f8w(nullptr, m, n, k, x_dtype, x.data(), ldx, code, w,
                                    scale.floats(), 1, b_dtype, b, y_dtype, y.data(), ldy));
      break;
    case kLinearF8: {
      Scratch codes(is_codes ? 0 : m * k), scales(is_codes ? 0 : m * 4);
      if (!call.has(codes.get()) || !call.has(scales.get())) return;
      const uint8_t* rows = static_cast<const uint8_t*>(codes.get());
      const float* row_scales = static_cast<const float*>(scales.get());
      if (is_codes) {
        rows = x.bytes();
        row_scales = x_scale.floats();
      } else {
        encode_rows(&call, x, x_scale, static_cast<uint8_t*>(codes.get()),
                    static_cast<float*>(scales.get()));
        if (!call.ok()) return;
      }
      const pk_format x_code = is_codes ? static_cast<pk_format>(attributes.x_code) : PK_F8_E4M3FN;
      call.check(kernels.linear_f8(nullptr, m, n, k, x_code, rows, ldx, row_scales,
                                   x_scale.rank() == 0 ? 0 : 1, code, w, scale.floats(), 1, b_dtype,
                                   b, y_dtype, y.data(), ldy));
      break;
    }
    default:
      call.expect(false, "policy_tensorflow: expected operation to be from 0 to 3");
  }
}

void encode(void* made, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<const Attributes*>(made);
  const PlainRounding rounding;
  Call call(context);
  Tensor x, scale, codes;
  if (!call.input(0, &x) || !call.input(1, &scale) || !bound(&call) ||
      !call.expect(x.rank() <= kMaxRank && scale.rank() == 0,
                   "policy_tensorflow: expected x of at most 32 axes, and scale to be a scalar")) {
    return;
  }
  int64_t dims[kMaxRank];
  for (int i = 0; i < x.rank(); ++i) dims[i] = x.dim(i);
  if (!call.output(0, x.rank(), dims, 1, &codes)) return;
  const bool scalar = x.rank() == 0;
  const int64_t m = scalar ? 1 : x.rows(), k = scalar ? 1 : x.last(), stride = at_least_1(k);
  call.check(kernels.encode_rows_f8(nullptr, static_cast<pk_format>(attributes.code), m, k,
                                    x.floats(), stride, scale.floats(), 0,
                                    static_cast<uint8_t*>(codes.data()), stride));
}

void quantize_rows(void* made, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<const Attributes*>(made);
  const PlainRounding rounding;
  Call call(context);
  Tensor x, codes, scale;
  if (!call.input(0, &x) || !bound(&call) ||
      !call.expect(x.rank() >= 1 && x.rank() <= kMaxRank,
                   "policy_tensorflow: expected x to have shape [..., k], of at most 32 axes")) {
    return;
  }
  int64_t dims[kMaxRank];
  for (int i = 0; i < x.rank(); ++i) dims[i] = x.dim(i);
  if (!call.output(0, x.rank(), dims, 1, &codes) ||
      !call.output(1, x.rank() - 1, dims, 4, &scale)) {
    return;
  }
  const int64_t stride = at_least_1(x.last());
  call.check(kernels.quantize_rows_f8(static_cast<pk_format>(attributes.code), x.rows(), x.last(),
                                      x.floats(), stride, static_cast<uint8_t*>(codes.data()),
                                      stride, static_cast<float*>(scale.data())));
}

void pack(void* made, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<const Attributes*>(made);
  Call call(context);
  Tensor codes, packed;
  int64_t bytes = 0;
  if (!call.input(0, &codes) || !bound(&call) ||
      !call.expect(codes.rank() == 2, "policy_tensorflow: expected codes of shape [n, k]")) {
    return;
  }
  const int64_t n = codes.dim(0), k = codes.dim(1);
  call.check(kernels.packed_bytes(n, k, &bytes));
  if (!call.ok() || !call.output(0, 1, &bytes, 1, &packed)) return;
  memset(packed.data(), 0, static_cast<size_t>(bytes));
  call.check(kernels.pack(static_cast<pk_format>(attributes.code), n, k, codes.data(),
                          at_least_1(k), packed.data()));
}

void unpack(void* made, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<const Attributes*>(made);
  const int64_t dims[] = {attributes.n, attributes.k};
  Call call(context);
  Tensor packed, codes;
  Weight prepared;
  if (!call.input(0, &packed) || !bound(&call)) return;
  const pk_format code = static_cast<pk_format>(attributes.code);
  const void* w = prepared.prepare(&call, packed, code, dims[0], dims[1]);
  if (w == nullptr || !call.output(0, 2, dims, 1, &codes)) return;
  call.check(kernels.unpack(code, dims[0], dims[1], w, codes.data(), at_least_1(dims[1])));
}

void rows(void* made, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<const Attributes*>(made);
  const PlainRounding rounding;
  Call call(context);
  Tensor ids, packed, scale, y;
  Weight prepared;
  if (!call.input(0, &ids) || !call.input(1, &packed) || !call.input(2, &scale) || !bound(&call) ||
      !call.expect(ids.rank() < kMaxRank && scale.rank() == 1,
                   "policy_tensorflow: expected ids of less than 32 axes and scale [n]")) {
    return;
  }
  const int64_t n = scale.dim(0), k = attributes.k;
  const pk_format code = static_cast<pk_format>(attributes.code);
  const void* w = prepared.prepare(&call, packed, code, n, k);
  if (w == nullptr) return;
  int64_t dims[kMaxRank];
  for (int i = 0; i < ids.rank(); ++i) dims[i] = ids.dim(i);
  dims[ids.rank()] = k;
  const TF_DataType type = call.output_type(0);
  if (!call.output(0, ids.rank() + 1, dims, float_bytes(type), &y)) return;
  call.check(kernels.dequantize_packed_rows(
      nullptr, ids.elements(), static_cast<const int64_t*>(ids.data()), code, n, k, w,
      scale.floats(), 1, float_dtype(type), y.data(), at_least_1(k)));
}

/* Registration. */

void* create(TF_OpKernelConstruction* construction) {
  Attributes* made = static_cast<Attributes*>(calloc(1, sizeof(Attributes)));
  TF_Status* status = tf.NewStatus();
  if (made == nullptr) {
    tf.SetStatus(status, static_cast<TF_Code>(kResourceExhausted), "there is no memory");
  } else {
    const struct {
      const char* name;
      int64_t* value;
    } all[] = {{"operation", &made->operation},
               {"code", &made->code},
               {"x_code", &made->x_code},
               {"n", &made->n},
               {"k", &made->k}};
    for (const auto& one : all) {
      if (good(status) && tf.OpKernelConstruction_HasAttr(construction, one.name, status)) {
        tf.OpKernelConstruction_GetAttrInt64(construction, one.name, one.value, status);
      }
    }
  }
  if (!good(status)) tf.OpKernelConstruction_Failure(construction, status);
  tf.DeleteStatus(status);
  return made;
}

#define POLICY_FLOATS "{float, bfloat16, half}"

struct Definition {
  const char* name;
  const char* inputs[5];
  const char* outputs[2];
  const char* attributes[6];
  ShapeFunction shape;
  ComputeFunction compute;
};

const Definition definitions[] = {
    {POLICY_OP("Linear"),
     {"x: T", "x_scale: float", "weight: uint8", "scale: float", "bias: B"},
     {"y: Y"},
     {"T: {float, bfloat16, half, uint8}", "B: " POLICY_FLOATS, "Y: " POLICY_FLOATS,
      "operation: int", "code: int", "x_code: int = 0"},
     shape_linear,
     linear},
    {POLICY_OP("Encode"),
     {"x: float", "scale: float"},
     {"codes: uint8"},
     {"code: int"},
     shape_encode,
     encode},
    {POLICY_OP("QuantizeRows"),
     {"x: float"},
     {"codes: uint8", "scale: float"},
     {"code: int"},
     shape_quantize_rows,
     quantize_rows},
    {POLICY_OP("Pack"), {"codes: uint8"}, {"packed: uint8"}, {"code: int"}, shape_unknown, pack},
    {POLICY_OP("Unpack"),
     {"packed: uint8"},
     {"codes: uint8"},
     {"code: int", "n: int", "k: int"},
     shape_unknown,
     unpack},
    {POLICY_OP("Rows"),
     {"ids: int64", "packed: uint8", "scale: float"},
     {"y: Y"},
     {"Y: " POLICY_FLOATS, "code: int", "k: int"},
     shape_unknown,
     rows},
};

/* Registers an operator and its CPU kernel. */
void define(const Definition& definition, TF_Status* status) {
  TF_OpDefinitionBuilder* op = tf.NewOpDefinitionBuilder(definition.name);
  for (const char* attribute : definition.attributes) {
    if (attribute != nullptr) tf.OpDefinitionBuilderAddAttr(op, attribute);
  }
  for (const char* input : definition.inputs) {
    if (input != nullptr) tf.OpDefinitionBuilderAddInput(op, input);
  }
  for (const char* output : definition.outputs) {
    if (output != nullptr) tf.OpDefinitionBuilderAddOutput(op, output);
  }
  tf.OpDefinitionBuilderSetShapeInferenceFunction(op, definition.shape);
  tf.RegisterOpDefinition(op, status);
  if (!good(status)) return;
  TF_KernelBuilder* kernel =
      tf.NewKernelBuilder(definition.name, "CPU", create, definition.compute, free);
  tf.RegisterKernelBuilder(definition.name, kernel, status);
}

__attribute__((constructor)) void register_all() {
  if (const char* missing = tf.resolve()) {
    snprintf(problem, sizeof(problem), "this TensorFlow has no %s", missing);
    return;
  }
  TF_Status* status = tf.NewStatus();
  for (const Definition& definition : definitions) {
    if (good(status)) define(definition, status);
  }
  if (!good(status)) snprintf(problem, sizeof(problem), "%s", tf.Message(status));
  tf.DeleteStatus(status);
}

}  // namespace

extern "C" {

/* The version of the kernels' interface that this was compiled for. */
PK_API int32_t policy_tensorflow_abi_version() { return PK_ABI_VERSION; }
PK_API int32_t policy_tensorflow_operators_version() { return POLICY_OPERATORS_VERSION; }

/* Why the operators were not registered; "" if they were. */
PK_API const char* policy_tensorflow_problem() { return problem; }

/* Takes the kernels' functions, in the order of Functions. */
PK_API void policy_tensorflow_bind(void* const* functions) {
  memcpy(&kernels, functions, sizeof(kernels));
}

}  // extern "C"
