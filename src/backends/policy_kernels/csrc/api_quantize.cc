// The public quantizers: check the arguments, then run the kernel of the chosen instruction set.
#include "checks.h"
#include "dispatch.h"

namespace {

using pk::Checks;
using pk::kernels;

// Where rows have no elements their pointer may be NULL, and no offset may be added to NULL.
int64_t offset_stride(int64_t k, int64_t stride) { return k == 0 ? 0 : stride; }

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
  kernels().rows->quantize_rows_s8(m, k, x, offset_stride(k, ldx), codes, offset_stride(k, ldq),
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
  kernels().rows->encode_f8(format, n, x, scale, codes);
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
  kernels().rows->quantize_rows_f8(format, m, k, x, offset_stride(k, ldx), codes,
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
  kernels().rows->decode_f8(format, n, codes, y);
  return PK_OK;
}
