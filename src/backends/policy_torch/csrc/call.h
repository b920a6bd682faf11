/* One call of an operator: its arguments, what it makes on the way, its results, what went wrong.
 */
#ifndef POLICY_TORCH_CALL_H_
#define POLICY_TORCH_CALL_H_

#include "policy_kernels.h"
#include "torch_shim.h"

/* torch's numbers of dtypes, which its interface keeps behind functions. */
struct Dtypes {
  int32_t float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, uint8, int64;
};
extern Dtypes dtypes;

pk_dtype float_kind(int32_t dtype);      /* or -1 */
int32_t float_or_float32(int32_t dtype); /* the dtype itself where float_kind knows it */
pk_format code_kind(int32_t dtype);      /* or -1 */

/* A tensor as it lies in memory; without a handle where an optional one is absent. */
struct View {
  shim::Tensor handle;
  const void* data;
  const int64_t *sizes, *strides; /* in elements */
  int64_t dim, elements;
  int32_t dtype;

  explicit operator bool() const { return handle != nullptr; }
  int64_t last() const { return dim == 0 ? 1 : sizes[dim - 1]; }
  bool contiguous() const;

  template <class Type>
  const Type* as() const {
    return static_cast<const Type*>(data);
  }
};

/* A tensor of shape (..., k) as a matrix. */
struct Rows {
  View view;
  int64_t m, k, stride;
};

class Call {
 public:
  explicit Call(shim::Value* stack) : stack_(stack) {}

  /* Arguments by their place. Each tensor must be read, or it would never be freed. */
  View tensor(int place);
  View optional_tensor(int place);
  int64_t integer(int place) const { return static_cast<int64_t>(stack_[place]); }
  int32_t dtype(int place) const { return static_cast<int32_t>(stack_[place]); }

  /* All below gives nothing useful once something has failed. */
  bool failed() const { return message_[0] != '\0'; }
  const char* message() const { return message_; }
  void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
  /* Fails unless a function of the kernels gave PK_OK. */
  void check(pk_status status);

  /* A new tensor, contiguous. */
  View empty(int64_t dim, const int64_t* sizes, int32_t dtype);
  /* The same whose shape is that of a tensor's first axes, and then k. */
  View empty_rows(const View& of, int64_t axes, int64_t k, int32_t dtype);
  void* data_of(const View& made);
  /* The tensor itself where it has this dtype and is contiguous, else a copy. */
  View dense(const View& view, int32_t dtype);
  /* The tensor itself where its rows are contiguous and lie one after the other, else a copy. */
  Rows rows(const View& view, int32_t dtype);

  /* A result. */
  void give(int place, const View& made);

  /* Frees what the call owns, and puts the results on the stack if there was no failure. */
  void end(int results);

 private:
  View own(shim::Tensor handle);

  static constexpr int kMostTensors = 24, kMostResults = 2;
  shim::Value* stack_;
  shim::Tensor owned_[kMostTensors];
  int owned_count_ = 0;
  shim::Tensor results_[kMostResults] = {nullptr, nullptr};
  char message_[512] = "";
};

#endif  // POLICY_TORCH_CALL_H_
