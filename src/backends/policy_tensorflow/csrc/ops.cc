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

#include "plain_rounding.h"
#include "policy_kernels.h"
#include "tensorflow_c.h"

using namespace tensorflow_c;

namespace {

#define POLICY_STRING(x) #x
#define POLICY_EXPANDED(x) POLICY_STRING(x)
#define POLICY_OP(name) "ImportPolicyCore>" name "V" POLICY_EXPANDED(PK_ABI_VERSION)

Api tf;
/* Why nothing was registered; "" if all was. */
char problem[512];

/* The kernels' functions, given by policy_tensorflow_bind: the library that has them is loaded. */
struct Functions {
  decltype(&pk_last_error) last_error;
  decltype(&pk_packed_bytes) packed_bytes;
  decltype(&pk_pack) pack;
  decltype(&pk_unpack) unpack;
  decltype(&pk_encode_f8) encode_f8;
  decltype(&pk_quantize_rows_f8) quantize_rows_f8;
  decltype(&pk_dequantize_packed_rows) dequantize_packed_rows;
  decltype(&pk_linear_s8) linear_s8;
  decltype(&pk_linear_s8w) linear_s8w;
  decltype(&pk_linear_f8) linear_f8;
  decltype(&pk_linear_f8w) linear_f8w;
};

Functions kernels;

enum Operation { kLinearS8 = 0, kLinearS8w = 1, kLinearF8 = 2, kLinearF8w = 3 };

/* Memory that goes with the call; NULL where there is none. */
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (posix_memalign(&data_, 64, static_cast<size_t>(bytes > 0 ? bytes : 1)) != 0) {
      data_ = nullptr;
    }
  }
  ~Scratch() { free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

struct Tensor {
  TF_Tensor* handle = nullptr;

  ~Tensor() {
    if (handle != nullptr) tf.DeleteTensor(handle);
  }
  int rank() const { return tf.NumDims(handle); }
  int64_t dim(int i) const { return tf.Dim(handle, i); }
  int64_t last() const { return dim(rank() - 1); }
  int64_t rows() const {
    int64_t product = 1;
    for (int i = 0; i + 1 < rank(); ++i) product *= dim(i);
    return product;
  }
  int64_t elements() const { return rank() == 0 ? 1 : rows() * last(); }
  TF_DataType type() const { return tf.TensorType(handle); }
  void* data() const { return tf.TensorData(handle); }
  const float* floats() const { return static_cast<const float*>(data()); }
  const uint8_t* bytes() const { return static_cast<const uint8_t*>(data()); }
};

constexpr int kMaxRank = 32;

/* One call of a kernel: its inputs and outputs, and whether something went wrong. */
class Call {
 public:
  explicit Call(TF_OpKernelContext* context) : context_(context), status_(tf.NewStatus()) {}
  ~Call() {
    if (!ok()) tf.OpKernelContext_Failure(context_, status_);
    tf.DeleteStatus(status_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool ok() const { return tf.GetCode(status_) == static_cast<TF_Code>(kOk); }

  void fail(int code, const char* message) {
    tf.SetStatus(status_, static_cast<TF_Code>(code), message);
  }
  /* Fails with a message unless a condition holds; gives the condition. */
  bool expect(bool condition, const char* message) {
    if (!condition) fail(kInvalidArgument, message);
    return condition;
  }
  void check(pk_status status) {
    if (status == PK_ERR_MEMORY) fail(kResourceExhausted, kernels.last_error());
    if (status == PK_ERR_ARGUMENT) fail(kInvalidArgument, kernels.last_error());
    if (status == PK_ERR_UNSUPPORTED) fail(kInternal, kernels.last_error());
  }
  bool has(const void* memory) {
    if (memory == nullptr) fail(kResourceExhausted, "policy_tensorflow: there is no memory");
    return memory != nullptr;
  }

  bool input(int index, Tensor* tensor) {
    if (ok()) tf.GetInput(context_, index, &tensor->handle, status_);
    return ok();
  }
  TF_DataType output_type(int index) { return tf.ExpectedOutputDataType(context_, index); }

  bool output(int index, int rank, const int64_t* dims, int64_t item, Tensor* tensor) {
    int64_t bytes = item;
    for (int i = 0; i < rank; ++i) bytes *= dims[i];
    const TF_DataType type = output_type(index);
    tensor->handle =
        tf.AllocateOutput(context_, index, type, dims, rank, static_cast<size_t>(bytes), status_);
    return ok();
  }

 private:
  TF_OpKernelContext* context_;
  TF_Status* status_;
};

/* What a node is made with. */
struct Attributes {
  int64_t operation = 0, code = 0, x_code = 0, n = 0, k = 0;
};

/* The pk_dtype of a type of floats, or -1. */
pk_dtype float_dtype(TF_DataType type) {
  if (type == static_cast<TF_DataType>(kFloat)) return PK_FLOAT32;
  if (type == static_cast<TF_DataType>(kBfloat16)) return PK_BFLOAT16;
  return type == static_cast<TF_DataType>(kHalf) ? PK_FLOAT16 : -1;
}

int64_t float_bytes(TF_DataType type) { return type == static_cast<TF_DataType>(kFloat) ? 4 : 2; }

int64_t at_least_1(int64_t value) { return value > 0 ? value : 1; }

/* A weight as the kernels read it: as it is where it is packed and its address is a multiple of 64,
 * as TensorFlow's buffers are; else in memory of its own. */
class Weight {
 public:
  ~Weight() { free(owned_); }

  const void* prepare(Call* call, const Tensor& given, pk_format code, int64_t n, int64_t k) {
    int64_t bytes = 0;
    call->check(kernels.packed_bytes(n, k, &bytes));
    const bool packed = given.rank() == 1;
    const char* message = packed ? "policy_tensorflow: expected a packed weight of the size that "
                                   "the last axis of x and the size of scale give"
                                 : "policy_tensorflow: expected codes of shape [n, k], with n the "
                                   "size of scale and k the last axis of x";
    const bool fits = packed ? given.elements() == bytes
                             : given.rank() == 2 && given.dim(0) == n && given.dim(1) == k;
    if (!call->ok() || !call->expect(fits, message)) return nullptr;
    if (packed && reinterpret_cast<uintptr_t>(given.data()) % 64 == 0) return given.data();
    if (posix_memalign(&owned_, 64, static_cast<size_t>(bytes)) != 0) owned_ = nullptr;
    if (!call->has(owned_)) return nullptr;
    if (packed) {
      memcpy(owned_, given.data(), static_cast<size_t>(bytes));
    } else {
      call->check(kernels.pack(code, n, k, given.data(), at_least_1(k), owned_));
    }
    return call->ok() ? owned_ : nullptr;
  }

 private:
  void* owned_ = nullptr;
};

bool bound(Call* call) {
  return call->expect(kernels.pack != nullptr,
                      "policy_tensorflow: expected `import policy_core` in this process, which "
                      "gives its operators the kernels");
}

/* The codes and scales of floats: under one scale where x_scale is [], else one a row. */
void encode_rows(Call* call, const Tensor& x, const Tensor& x_scale, uint8_t* codes,
                 float* scales) {
  const int64_t m = x.rows(), k = x.last(), stride = at_least_1(k);
  if (x_scale.rank() == 0) {
    scales[0] = x_scale.floats()[0];
    call->check(kernels.encode_f8(PK_F8_E4M3FN, m * k, x.floats(), scales[0], codes));
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
  call.check(kernels.encode_f8(static_cast<pk_format>(attributes.code), x.elements(), x.floats(),
                               scale.floats()[0], static_cast<uint8_t*>(codes.data())));
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

/* Shapes. */

class Shape {
 public:
  Shape() : handle_(tf.NewShapeHandle()) {}
  ~Shape() { tf.DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;
  operator TF_ShapeHandle*() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

bool good(const TF_Status* status) { return tf.GetCode(status) == static_cast<TF_Code>(kOk); }

/* [...] of input `x`, all of its axes or all but the last, with those of input `tail` behind. */
void shape_from(TF_ShapeInferenceContext* context, int output, int x, bool whole, int tail,
                TF_Status* status) {
  Shape given, leading, behind, result;
  tf.ShapeInferenceContextGetInput(context, x, given, status);
  if (!good(status) || !tf.ShapeInferenceContextRankKnown(context, given)) return;
  if (!whole) {
    tf.ShapeInferenceContextWithRankAtLeast(context, given, 1, given, status);
    if (good(status)) {
      tf.ShapeInferenceContextSubshape(context, given, 0, -1, leading, status);
    }
  }
  if (!good(status)) return;
  if (tail >= 0) {
    tf.ShapeInferenceContextGetInput(context, tail, behind, status);
    if (good(status)) tf.ShapeInferenceContextWithRank(context, behind, 1, behind, status);
    if (good(status)) {
      tf.ShapeInferenceContextConcatenateShapes(context, leading, behind, result, status);
    }
    if (good(status)) tf.ShapeInferenceContextSetOutput(context, output, result, status);
  } else {
    tf.ShapeInferenceContextSetOutput(context, output, whole ? given : leading, status);
  }
}

void shape_linear(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
  if (good(status)) shape_from(context, 0, 0, false, 3, status);
}

void shape_encode(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
  if (good(status)) shape_from(context, 0, 0, true, -1, status);
}

void shape_quantize_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
  if (good(status)) shape_from(context, 0, 0, true, -1, status);
  if (good(status)) shape_from(context, 1, 0, false, -1, status);
}

/* Sizes that attributes give, which shape functions cannot read: Python sets these shapes. */
void shape_unknown(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
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

/* Why the operators were not registered; "" if they were. */
PK_API const char* policy_tensorflow_problem() { return problem; }

/* Takes the kernels' functions, in the order of Functions. */
PK_API void policy_tensorflow_bind(void* const* functions) {
  memcpy(&kernels, functions, sizeof(kernels));
}

}  // extern "C"
