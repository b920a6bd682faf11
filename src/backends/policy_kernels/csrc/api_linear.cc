// The public products: check the arguments, then hand them to the driver.
#include "checks.h"
#include "linear.h"

namespace {

using pk::Checks;
using pk::Input;
using pk::Linear;
using pk::Packed;

// The number of scales behind a stride of 0 or 1.
int64_t scale_count(int64_t rows, int64_t stride) { return rows == 0 || stride == 1 ? rows : 1; }

// The arguments that all products have.
struct Common {
  const char* function;
  const pk_executor* executor;
  int64_t m, n, k;
  const void* w;
  const float* w_scale;
  int64_t w_scale_stride;
  pk_dtype bias_dtype;
  const void* bias;
  pk_dtype y_dtype;
  void* y;
  int64_t ldy;
};

void check_sizes(Checks& checks, const Common& common) {
  checks.executor(common.executor);
  checks.size("m", common.m);
  checks.size("n", common.n);
  checks.size("k", common.k);
}

void check_rest(Checks& checks, const Common& common, pk_format w_format) {
  checks.step("w_scale_stride", common.w_scale_stride);
  checks.vector("w_scale", common.w_scale, scale_count(common.n, common.w_scale_stride));
  checks.dtype("bias_dtype", common.bias_dtype);
  checks.dtype("y_dtype", common.y_dtype);
  checks.floats("y", common.y_dtype, common.y, common.m, common.n, common.ldy);
  if (common.n != 0) checks.packed("w", common.w, common.n, common.k, w_format);
}

pk_status run(const Checks& checks, const Common& common, Input input, int32_t x_type,
              const void* x, int64_t ldx, const float* x_scale, int64_t x_scale_stride) {
  if (!checks.ok() || common.m == 0 || common.n == 0) return checks.status();
  // Where rows have no elements their pointer may be NULL, and no offset may be added to NULL.
  const int64_t x_stride = common.k == 0 ? 0 : ldx;
  const Linear linear = {
      common.executor,
      common.m,
      input,
      x_type,
      x,
      x_stride,
      Packed(common.w, common.n),
      common.bias_dtype,
      common.bias,
      {x_scale, x_scale_stride, common.w_scale, common.w_scale_stride, nullptr, common.y_dtype,
       common.y, common.ldy},
  };
  const pk_status status = pk::run(linear);
  if (status != PK_ERR_MEMORY) return status;
  return pk::fail(status, "%s: could not allocate scratch rows of k=%lld elements", common.function,
                  static_cast<long long>(common.k));
}

}  // namespace

pk_status pk_linear_s8(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                       pk_dtype x_dtype, const void* x, int64_t ldx, const void* w,
                       const float* w_scale, pk_dtype bias_dtype, const void* bias,
                       pk_dtype y_dtype, void* y, int64_t ldy) {
  const Common common = {"pk_linear_s8", executor, m,       n, k,  w, w_scale, 1,
                         bias_dtype,     bias,     y_dtype, y, ldy};
  Checks checks(common.function);
  check_sizes(checks, common);
  checks.dtype("x_dtype", x_dtype);
  checks.floats("x", x_dtype, x, m, k, ldx);
  check_rest(checks, common, PK_S8);
  return run(checks, common, Input::kQuantized, x_dtype, x, ldx, nullptr, 0);
}

pk_status pk_linear_s8_codes(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                             const int8_t* x, int64_t ldx, const float* x_scale, const void* w,
                             const float* w_scale, pk_dtype bias_dtype, const void* bias,
                             pk_dtype y_dtype, void* y, int64_t ldy) {
  const Common common = {"pk_linear_s8_codes", executor, m,       n, k,  w, w_scale, 1,
                         bias_dtype,           bias,     y_dtype, y, ldy};
  Checks checks(common.function);
  check_sizes(checks, common);
  checks.matrix("x", x, m, k, ldx);
  checks.vector("x_scale", x_scale, m);
  check_rest(checks, common, PK_S8);
  return run(checks, common, Input::kCodesS8, 0, x, ldx, x_scale, 1);
}

pk_status pk_linear_s8w(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                        pk_dtype x_dtype, const void* x, int64_t ldx, const void* w,
                        const float* w_scale, pk_dtype bias_dtype, const void* bias,
                        pk_dtype y_dtype, void* y, int64_t ldy) {
  const Common common = {"pk_linear_s8w", executor, m,       n, k,  w, w_scale, 1,
                         bias_dtype,      bias,     y_dtype, y, ldy};
  Checks checks(common.function);
  check_sizes(checks, common);
  checks.dtype("x_dtype", x_dtype);
  checks.floats("x", x_dtype, x, m, k, ldx);
  check_rest(checks, common, PK_S8);
  return run(checks, common, Input::kFloats, x_dtype, x, ldx, nullptr, 0);
}

pk_status pk_linear_f8(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                       pk_format x_format, const uint8_t* x, int64_t ldx, const float* x_scale,
                       int64_t x_scale_stride, pk_format w_format, const void* w,
                       const float* w_scale, int64_t w_scale_stride, pk_dtype bias_dtype,
                       const void* bias, pk_dtype y_dtype, void* y, int64_t ldy) {
  const Common common = {"pk_linear_f8", executor,   m,    n,       k, w,  w_scale,
                         w_scale_stride, bias_dtype, bias, y_dtype, y, ldy};
  Checks checks(common.function);
  check_sizes(checks, common);
  checks.format("x_format", x_format);
  checks.matrix("x", x, m, k, ldx);
  checks.step("x_scale_stride", x_scale_stride);
  checks.vector("x_scale", x_scale, scale_count(m, x_scale_stride));
  checks.format("w_format", w_format);
  check_rest(checks, common, w_format);
  return run(checks, common, Input::kCodesF8, x_format, x, ldx, x_scale, x_scale_stride);
}

pk_status pk_linear_f8w(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                        pk_dtype x_dtype, const void* x, int64_t ldx, pk_format w_format,
                        const void* w, const float* w_scale, int64_t w_scale_stride,
                        pk_dtype bias_dtype, const void* bias, pk_dtype y_dtype, void* y,
                        int64_t ldy) {
  const Common common = {"pk_linear_f8w", executor,   m,    n,       k, w,  w_scale,
                         w_scale_stride,  bias_dtype, bias, y_dtype, y, ldy};
  Checks checks(common.function);
  check_sizes(checks, common);
  checks.dtype("x_dtype", x_dtype);
  checks.floats("x", x_dtype, x, m, k, ldx);
  checks.format("w_format", w_format);
  check_rest(checks, common, w_format);
  return run(checks, common, Input::kFloats, x_dtype, x, ldx, nullptr, 0);
}
