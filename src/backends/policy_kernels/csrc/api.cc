// The public functions: check the arguments, then run the kernel of the chosen instruction set.
#include "checks.h"
#include "dispatch.h"

namespace {

using pk::Checks;
using pk::kernels;

// Where rows have no elements their pointer may be NULL, and no offset may be added to NULL.
int64_t offset_stride(int64_t k, int64_t stride) { return k == 0 ? 0 : stride; }

// Sets the message for a kernel that could not allocate its rows.
pk_status finished(const char* function, pk_status status, int64_t k) {
  if (status != PK_ERR_MEMORY) return status;
  return pk::fail(status, "%s: could not allocate scratch rows of k=%lld elements", function,
                  static_cast<long long>(k));
}

// The number of scales behind a stride of 0 or 1.
int64_t scale_count(int64_t rows, int64_t stride) { return rows == 0 || stride == 1 ? rows : 1; }

}  // namespace

pk_status pk_quantize_rows_s8(int64_t m, int64_t k, const float* x, int64_t ldx, int8_t* codes,
                              int64_t ldq, float* scale) {
  Checks checks("pk_quantize_rows_s8");
  checks.size("m", m);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.matrix("codes", codes, m, k, ldq);
  checks.vector("scale", scale, m);
  if (!checks.ok()) return checks.status();
  kernels().quantize_rows_s8.run(m, k, x, offset_stride(k, ldx), codes, offset_stride(k, ldq),
                                 scale);
  return PK_OK;
}

pk_status pk_encode_f8(pk_format format, int64_t n, const float* x, float scale, uint8_t* codes) {
  Checks checks("pk_encode_f8");
  checks.format("format", format);
  checks.size("n", n);
  checks.vector("x", x, n);
  checks.divisor("scale", scale);
  checks.vector("codes", codes, n);
  if (!checks.ok()) return checks.status();
  kernels().encode_f8.run(format, n, x, scale, codes);
  return PK_OK;
}

pk_status pk_quantize_rows_f8(pk_format format, int64_t m, int64_t k, const float* x, int64_t ldx,
                              uint8_t* codes, int64_t ldq, float* scale) {
  Checks checks("pk_quantize_rows_f8");
  checks.format("format", format);
  checks.size("m", m);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.matrix("codes", codes, m, k, ldq);
  checks.vector("scale", scale, m);
  if (!checks.ok()) return checks.status();
  kernels().quantize_rows_f8.run(format, m, k, x, offset_stride(k, ldx), codes,
                                 offset_stride(k, ldq), scale);
  return PK_OK;
}

pk_status pk_decode_f8(pk_format format, int64_t n, const uint8_t* codes, float* y) {
  Checks checks("pk_decode_f8");
  checks.format("format", format);
  checks.size("n", n);
  checks.vector("codes", codes, n);
  checks.vector("y", y, n);
  if (!checks.ok()) return checks.status();
  kernels().decode_f8.run(format, n, codes, y);
  return PK_OK;
}

pk_status pk_linear_s8(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                       const int8_t* w, int64_t ldw, const float* w_scale, const float* bias,
                       float* y, int64_t ldy) {
  Checks checks("pk_linear_s8");
  checks.size("m", m);
  checks.size("n", n);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.matrix("w", w, n, k, ldw);
  checks.vector("w_scale", w_scale, n);
  checks.matrix("y", y, m, n, ldy);
  if (!checks.ok() || m == 0 || n == 0) return checks.status();
  return finished("pk_linear_s8",
                  kernels().linear_s8.run(m, n, k, x, offset_stride(k, ldx), w,
                                          offset_stride(k, ldw), w_scale, bias, y, ldy),
                  k);
}

pk_status pk_linear_s8_codes(int64_t m, int64_t n, int64_t k, const int8_t* x, int64_t ldx,
                             const float* x_scale, const int8_t* w, int64_t ldw,
                             const float* w_scale, const float* bias, float* y, int64_t ldy) {
  Checks checks("pk_linear_s8_codes");
  checks.size("m", m);
  checks.size("n", n);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.vector("x_scale", x_scale, m);
  checks.matrix("w", w, n, k, ldw);
  checks.vector("w_scale", w_scale, n);
  checks.matrix("y", y, m, n, ldy);
  if (!checks.ok() || m == 0 || n == 0) return checks.status();
  return finished("pk_linear_s8_codes",
                  kernels().linear_s8_codes.run(m, n, k, x, offset_stride(k, ldx), x_scale, w,
                                                offset_stride(k, ldw), w_scale, bias, y, ldy),
                  k);
}

pk_status pk_linear_s8w(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                        const int8_t* w, int64_t ldw, const float* w_scale, const float* bias,
                        float* y, int64_t ldy) {
  Checks checks("pk_linear_s8w");
  checks.size("m", m);
  checks.size("n", n);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.matrix("w", w, n, k, ldw);
  checks.vector("w_scale", w_scale, n);
  checks.matrix("y", y, m, n, ldy);
  if (!checks.ok() || m == 0 || n == 0) return checks.status();
  return finished("pk_linear_s8w",
                  kernels().linear_s8w.run(m, n, k, x, offset_stride(k, ldx), w,
                                           offset_stride(k, ldw), w_scale, bias, y, ldy),
                  k);
}

pk_status pk_linear_f8(int64_t m, int64_t n, int64_t k, pk_format x_format, const uint8_t* x,
                       int64_t ldx, const float* x_scale, int64_t x_scale_stride,
                       pk_format w_format, const uint8_t* w, int64_t ldw, const float* w_scale,
                       int64_t w_scale_stride, const float* bias, float* y, int64_t ldy) {
  Checks checks("pk_linear_f8");
  checks.size("m", m);
  checks.size("n", n);
  checks.size("k", k);
  checks.format("x_format", x_format);
  checks.matrix("x", x, m, k, ldx);
  checks.step("x_scale_stride", x_scale_stride);
  checks.vector("x_scale", x_scale, scale_count(m, x_scale_stride));
  checks.format("w_format", w_format);
  checks.matrix("w", w, n, k, ldw);
  checks.step("w_scale_stride", w_scale_stride);
  checks.vector("w_scale", w_scale, scale_count(n, w_scale_stride));
  checks.matrix("y", y, m, n, ldy);
  if (!checks.ok() || m == 0 || n == 0) return checks.status();
  return finished("pk_linear_f8",
                  kernels().linear_f8.run(m, n, k, x_format, x, offset_stride(k, ldx), x_scale,
                                          x_scale_stride, w_format, w, offset_stride(k, ldw),
                                          w_scale, w_scale_stride, bias, y, ldy),
                  k);
}

pk_status pk_linear_f8w(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                        pk_format w_format, const uint8_t* w, int64_t ldw, const float* w_scale,
                        int64_t w_scale_stride, const float* bias, float* y, int64_t ldy) {
  Checks checks("pk_linear_f8w");
  checks.size("m", m);
  checks.size("n", n);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.format("w_format", w_format);
  checks.matrix("w", w, n, k, ldw);
  checks.step("w_scale_stride", w_scale_stride);
  checks.vector("w_scale", w_scale, scale_count(n, w_scale_stride));
  checks.matrix("y", y, m, n, ldy);
  if (!checks.ok() || m == 0 || n == 0) return checks.status();
  return finished(
      "pk_linear_f8w",
      kernels().linear_f8w.run(m, n, k, x, offset_stride(k, ldx), w_format, w,
                               offset_stride(k, ldw), w_scale, w_scale_stride, bias, y, ldy),
      k);
}
