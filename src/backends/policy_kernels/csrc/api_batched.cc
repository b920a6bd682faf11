// Batches of products: check what they share, then run them side by side.
#include <atomic>
#include <cinttypes>
#include <type_traits>

#include "checks.h"
#include "packed.h"
#include "threads.h"

namespace {

struct Batch {
  const pk_executor* executor;
  pk_operation operation;
  int64_t m, n, k;
  int32_t x_type;
  const void* x;
  int64_t ldx;
  const float* x_scale;
  int64_t x_scale_stride;
  pk_format w_code;
  const void* const* w;
  const float* w_scale;
  int64_t w_scale_stride;
  pk_dtype bias_dtype;
  const void* bias;
  pk_dtype y_dtype;
  void* y;
  int64_t ldy;
  const pk_steps* steps;
  std::atomic<pk_status> status;
};

int64_t float_bytes(pk_dtype dtype) { return dtype == PK_FLOAT32 ? 4 : 2; }

// The operand of one product; an absent one stays absent.
template <class T>
T* at(T* first, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return first == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + bytes);
}

pk_status product(const Batch& batch, int64_t i) {
  const pk_steps& step = *batch.steps;
  const bool floats = batch.operation != PK_LINEAR_S8_CODES && batch.operation != PK_LINEAR_F8;
  const void* x = at(batch.x, i * step.x * (floats ? float_bytes(batch.x_type) : 1));
  const float* x_scale = at(batch.x_scale, i * step.x_scale * 4);
  const void* w = batch.w[i];
  const float* w_scale = at(batch.w_scale, i * step.w_scale * 4);
  const void* bias = at(batch.bias, i * step.bias * float_bytes(batch.bias_dtype));
  void* y = at(batch.y, i * step.y * float_bytes(batch.y_dtype));
  const auto& b = batch;
  switch (batch.operation) {
    case PK_LINEAR_S8:
      return pk_linear_s8(b.executor, b.m, b.n, b.k, b.x_type, x, b.ldx, w, w_scale, b.bias_dtype,
                          bias, b.y_dtype, y, b.ldy);
    case PK_LINEAR_S8_CODES:
      return pk_linear_s8_codes(b.executor, b.m, b.n, b.k, static_cast<const int8_t*>(x), b.ldx,
                                x_scale, w, w_scale, b.bias_dtype, bias, b.y_dtype, y, b.ldy);
    case PK_LINEAR_S8W:
      return pk_linear_s8w(b.executor, b.m, b.n, b.k, b.x_type, x, b.ldx, w, w_scale, b.bias_dtype,
                           bias, b.y_dtype, y, b.ldy);
    case PK_LINEAR_F8:
      return pk_linear_f8(b.executor, b.m, b.n, b.k, b.x_type, static_cast<const uint8_t*>(x),
                          b.ldx, x_scale, b.x_scale_stride, b.w_code, w, w_scale, b.w_scale_stride,
                          b.bias_dtype, bias, b.y_dtype, y, b.ldy);
    default:
      return pk_linear_f8w(b.executor, b.m, b.n, b.k, b.x_type, x, b.ldx, b.w_code, w, w_scale,
                           b.w_scale_stride, b.bias_dtype, bias, b.y_dtype, y, b.ldy);
  }
}

void run_one(void* context, int64_t index) {
  Batch& batch = *static_cast<Batch*>(context);
  const pk_status status = product(batch, index + 1);
  if (status != PK_OK) batch.status.store(status);
}

// Whether the last product's offset fits memory; steps are at least 0.
bool fits(int64_t count, int64_t step) {
  int64_t bytes;
  return step >= 0 && !__builtin_mul_overflow(count, step, &bytes) &&
         !__builtin_mul_overflow(bytes, int64_t{4}, &bytes);
}

}  // namespace

pk_status pk_linear_batched(const pk_executor* executor, pk_operation operation, int64_t count,
                            const pk_steps* steps, int64_t m, int64_t n, int64_t k, int32_t x_type,
                            const void* x, int64_t ldx, const float* x_scale,
                            int64_t x_scale_stride, pk_format w_code, const void* const* w,
                            const float* w_scale, int64_t w_scale_stride, pk_dtype bias_dtype,
                            const void* bias, pk_dtype y_dtype, void* y, int64_t ldy) {
  constexpr const char* kName = "pk_linear_batched";
  pk::Checks checks(kName);
  checks.executor(executor);
  checks.size("count", count);
  checks.vector("w", w, count);
  if (!checks.ok()) return checks.status();
  if (operation < PK_LINEAR_S8 || operation > PK_LINEAR_F8W) {
    return pk::fail(PK_ERR_ARGUMENT, "%s: expected an operation from 0 to 4, got %d", kName,
                    static_cast<int>(operation));
  }
  if (count == 0) return PK_OK;
  if (steps == nullptr || !fits(count, steps->x) || !fits(count, steps->x_scale) ||
      !fits(count, steps->w_scale) || !fits(count, steps->bias) || !fits(count, steps->y)) {
    return pk::fail(PK_ERR_ARGUMENT,
                    "%s: expected steps of at least 0 that stay in memory for count=%" PRId64,
                    kName, count);
  }
  if (count > 1 && m > 0 && n > 0 && steps->y / m < n) {
    return pk::fail(PK_ERR_ARGUMENT,
                    "%s: expected results that do not overlap, got m=%" PRId64 ", n=%" PRId64
                    " and steps->y=%" PRId64,
                    kName, m, n, steps->y);
  }
  for (int64_t i = 0; i < count && n != 0; ++i) {
    checks.packed("w", w[i], n, k, w_code);
    if (!checks.ok()) return checks.status();
  }
  Batch batch = {executor,   operation,
                 m,          n,
                 k,          x_type,
                 x,          ldx,
                 x_scale,    x_scale_stride,
                 w_code,     w,
                 w_scale,    w_scale_stride,
                 bias_dtype, bias,
                 y_dtype,    y,
                 ldy,        steps,
                 {PK_OK}};
  // The first product checks what all of them share; after it only memory can run out.
  const pk_status first = product(batch, 0);
  if (first != PK_OK || count == 1) return first;
  const int64_t threads = executor != nullptr ? executor->threads : pk_num_threads();
  pk::parallel_for(executor, threads < count ? threads : count - 1, count - 1, run_one, &batch);
  if (batch.status.load() == PK_OK) return PK_OK;
  return pk::fail(PK_ERR_MEMORY, "%s: could not allocate scratch rows of k=%" PRId64 " elements",
                  kName, k);
}
