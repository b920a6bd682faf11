// Checks of the arguments of one call. The first one that fails sets the thread's error message and
// the status; the later ones then do nothing.
#pragma once

#include "policy_kernels.h"

namespace pk {

// Sets this thread's error message, as printf does, and returns `status`.
pk_status fail(pk_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

class Checks {
 public:
  explicit Checks(const char* function) : function_(function) {}

  // A count of elements: at least 0.
  void size(const char* name, int64_t value);

  // A float8 format.
  void format(const char* name, pk_format value);

  // A float8 format, or PK_S8.
  void code(const char* name, pk_format value);

  // A float dtype.
  void dtype(const char* name, pk_dtype value);

  // A factor to divide by: greater than 0 and finite, or NaN.
  void divisor(const char* name, float value);

  // A stride that is 0 or 1.
  void step(const char* name, int64_t value);

  // A matrix of `rows` rows of `columns` elements, `stride` apart: the stride is long enough, the
  // matrix is not larger than memory can be, and the pointer is there unless it has no elements.
  // The sizes must have been checked before.
  template <class T>
  void matrix(const char* name, const T* data, int64_t rows, int64_t columns, int64_t stride) {
    extent(name, data, rows, columns, stride, static_cast<int64_t>(sizeof(T)));
  }

  template <class T>
  void vector(const char* name, const T* data, int64_t count) {
    extent(name, data, count == 0 ? 0 : 1, count, count, static_cast<int64_t>(sizeof(T)));
  }

  // The same for elements of a dtype that was checked before.
  void floats(const char* name, pk_dtype dtype, const void* data, int64_t rows, int64_t columns,
              int64_t stride) {
    extent(name, data, rows, columns, stride, dtype == PK_FLOAT32 ? 4 : 2);
  }

  // A packed weight [n][k] of codes of one kind, n not 0; or whole panels in a row of a larger one.
  void packed(const char* name, const void* data, int64_t n, int64_t k, pk_format code);

  // An executor, or null.
  void executor(const pk_executor* executor);

  bool ok() const { return status_ == PK_OK; }
  pk_status status() const { return status_; }

 private:
  void extent(const char* name, const void* data, int64_t rows, int64_t columns, int64_t stride,
              int64_t element_bytes);

  const char* function_;
  pk_status status_ = PK_OK;
};

}  // namespace pk
