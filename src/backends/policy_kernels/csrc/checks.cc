#include "checks.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

#include "packed.h"

namespace pk {
namespace {

thread_local char last_error[512] = "";

}  // namespace

pk_status fail(pk_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

void Checks::size(const char* name, int64_t value) {
  if (!ok() || value >= 0) return;
  status_ = fail(PK_ERR_ARGUMENT, "%s: expected %s >= 0, got %" PRId64, function_, name, value);
}

void Checks::format(const char* name, pk_format value) {
  if (!ok() || value == PK_F8_E4M3FN || value == PK_F8_E5M2) return;
  status_ =
      fail(PK_ERR_ARGUMENT, "%s: expected %s to be 0 (float8_e4m3fn) or 1 (float8_e5m2), got %d",
           function_, name, static_cast<int>(value));
}

void Checks::code(const char* name, pk_format value) {
  if (!ok() || value == PK_F8_E4M3FN || value == PK_F8_E5M2 || value == PK_S8) return;
  status_ = fail(PK_ERR_ARGUMENT,
                 "%s: expected %s to be 0 (float8_e4m3fn), 1 (float8_e5m2) or 2 (int8), got %d",
                 function_, name, static_cast<int>(value));
}

void Checks::dtype(const char* name, pk_dtype value) {
  if (!ok() || value == PK_FLOAT32 || value == PK_BFLOAT16 || value == PK_FLOAT16) return;
  status_ = fail(PK_ERR_ARGUMENT,
                 "%s: expected %s to be 0 (float32), 1 (bfloat16) or 2 (float16), got %d",
                 function_, name, static_cast<int>(value));
}

void Checks::packed(const char* name, const void* data, int64_t n, int64_t k, pk_format code) {
  if (!ok()) return;
  if (data == nullptr) {
    status_ = fail(PK_ERR_ARGUMENT, "%s: expected a pointer to a packed weight for %s, got NULL",
                   function_, name);
    return;
  }
  const Packed found(data, n);
  if (!found.valid()) {
    status_ = fail(PK_ERR_ARGUMENT,
                   "%s: expected %s to be what pk_pack wrote at this address, got other bytes (was "
                   "it moved? unpack it and pack it again)",
                   function_, name);
    return;
  }
  if (!found.has_n() || found.k() != k || found.code() != code) {
    status_ = fail(PK_ERR_ARGUMENT,
                   "%s: expected %s to be packed from n=%" PRId64 ", k=%" PRId64
                   " and code %d, got n=%" PRId64 ", k=%" PRId64 " and code %d",
                   function_, name, n, k, static_cast<int>(code), found.packed_n(), found.k(),
                   static_cast<int>(found.code()));
  }
}

void Checks::executor(const pk_executor* executor) {
  if (!ok() || executor == nullptr) return;
  const bool can_run = executor->submit != nullptr || executor->run != nullptr;
  if (executor->threads >= 1 && (executor->threads == 1 || can_run)) return;
  status_ = fail(PK_ERR_ARGUMENT,
                 "%s: expected an executor with threads >= 1 and, above 1, a function submit or "
                 "run, got threads=%d and %s of them",
                 function_, static_cast<int>(executor->threads), can_run ? "one" : "none");
}

void Checks::divisor(const char* name, float value) {
  const bool is_nan = value != value;
  if (!ok() || is_nan || (value > 0.0f && value <= 0x1.fffffep127f)) return;
  status_ = fail(PK_ERR_ARGUMENT, "%s: expected %s > 0 and finite (or NaN), got %g", function_,
                 name, static_cast<double>(value));
}

void Checks::step(const char* name, int64_t value) {
  if (!ok() || value == 0 || value == 1) return;
  status_ = fail(PK_ERR_ARGUMENT,
                 "%s: expected %s to be 0 (one for all) or 1 (one per row), got %" PRId64,
                 function_, name, value);
}

void Checks::extent(const char* name, const void* data, int64_t rows, int64_t columns,
                    int64_t stride, int64_t element_bytes) {
  if (!ok()) return;
  if (stride < columns) {
    status_ = fail(PK_ERR_ARGUMENT,
                   "%s: expected the row stride of %s to be at least its row length %" PRId64
                   ", got %" PRId64,
                   function_, name, columns, stride);
    return;
  }
  if (rows == 0 || columns == 0) return;
  int64_t bytes;
  if (__builtin_mul_overflow(rows - 1, stride, &bytes) ||
      __builtin_add_overflow(bytes, columns, &bytes) ||
      __builtin_mul_overflow(bytes, element_bytes, &bytes)) {
    status_ = fail(PK_ERR_ARGUMENT,
                   "%s: expected %s to fit in memory, got %" PRId64 " rows of %" PRId64
                   " elements with row stride %" PRId64,
                   function_, name, rows, columns, stride);
    return;
  }
  if (data == nullptr) {
    status_ =
        fail(PK_ERR_ARGUMENT,
             "%s: expected a pointer to %" PRId64 " rows of %" PRId64 " elements for %s, got NULL",
             function_, rows, columns, name);
  }
}

}  // namespace pk

const char* pk_last_error(void) { return pk::last_error; }
