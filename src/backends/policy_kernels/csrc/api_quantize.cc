// The public quantizers: check the arguments, then run the kernel of the chosen instruction set.
#include "checks.h"
#include "dispatch.h"
#include "threads.h"

namespace {

using pk::Checks;
using pk::kernels;

// Work of one task, so that claiming it costs little beside it.
constexpr int64_t kTaskElements = 16 << 10;

// Where rows have no elements their pointer may be NULL, and no offset may be added to NULL.
int64_t offset_stride(int64_t k, int64_t stride) { return k == 0 ? 0 : stride; }

struct Encoding {
  pk_format format;
  int64_t m, k, rows_per_task;
  const float* x;
  int64_t ldx;
  const float* scale;
  int64_t scale_stride;
  uint8_t* codes;
  int64_t ldq;
};

void encode_rows(void* context, int64_t task) {
  const Encoding& job = *static_cast<const Encoding*>(context);
  const int64_t first = task * job.rows_per_task;
  const int64_t end = job.m - first < job.rows_per_task ? job.m : first + job.rows_per_task;
  for (int64_t row = first; row < end; ++row) {
    kernels().rows->encode_f8(job.format, job.k, job.x + row * job.ldx,
                              job.scale[row * job.scale_stride], job.codes + row * job.ldq);
  }
}

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

pk_status pk_encode_rows_f8(const pk_executor* executor, pk_format format, int64_t m, int64_t k,
                            const float* x, int64_t ldx, const float* scale, int64_t scale_stride,
                            uint8_t* codes, int64_t ldq) {
  Checks checks("pk_encode_rows_f8");
  checks.executor(executor);
  checks.format("format", format);
  checks.size("m", m);
  checks.size("k", k);
  checks.matrix("x", x, m, k, ldx);
  checks.step("scale_stride", scale_stride);
  const int64_t scales = m == 0 || scale_stride == 1 ? m : 1;
  checks.vector("scale", scale, scales);
  for (int64_t i = 0; checks.ok() && i < scales; ++i) checks.divisor("scale", scale[i]);
  checks.matrix("codes", codes, m, k, ldq);
  if (!checks.ok() || m == 0 || k == 0) return checks.status();
  Encoding job = {format,       m,     k,  k < kTaskElements ? kTaskElements / k : 1, x, ldx, scale,
                  scale_stride, codes, ldq};
  // One thread makes some 4 codes in a nanosecond.
  pk::parallel_for(executor, pk::threads_for(executor, m * k / 4), (m - 1) / job.rows_per_task + 1,
                   encode_rows, &job);
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
