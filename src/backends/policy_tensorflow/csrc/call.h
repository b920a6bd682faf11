/* One call of an operator's kernel: its tensors, its memory, and whether something went wrong.
 */
#ifndef POLICY_TENSORFLOW_CALL_H_
#define POLICY_TENSORFLOW_CALL_H_

#include <stdlib.h>
#include <string.h>

#include "policy_kernels.h"
#include "tensorflow_c.h"

namespace {

using namespace tensorflow_c;

Api tf;

/* The kernels' functions, given by policy_tensorflow_bind: the library that has them is loaded. */
struct Functions {
  decltype(&pk_last_error) last_error;
  decltype(&pk_packed_bytes) packed_bytes;
  decltype(&pk_pack) pack;
  decltype(&pk_unpack) unpack;
  decltype(&pk_encode_rows_f8) encode_rows_f8;
  decltype(&pk_quantize_rows_f8) quantize_rows_f8;
  decltype(&pk_dequantize_packed_rows) dequantize_packed_rows;
  decltype(&pk_linear_s8) linear_s8;
  decltype(&pk_linear_s8w) linear_s8w;
  decltype(&pk_linear_f8) linear_f8;
  decltype(&pk_linear_f8w) linear_f8w;
};

Functions kernels;

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

}  // namespace

#endif  // POLICY_TENSORFLOW_CALL_H_
