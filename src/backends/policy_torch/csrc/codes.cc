/* The operators that make codes, and those that read them back. */
#include <string.h>

#include <atomic>

#include "executor.h"
#include "kernel_functions.h"
#include "operators.h"
#include "weight.h"

namespace {

/* So many elements are quantized by one thread at least. */
constexpr int64_t kGrain = 1 << 18;
/* So many bfloat16 are made float32 at a time: they stay in the first level cache. */
constexpr int64_t kChunk = 4096;

struct Encoding {
  pk_format format;
  int64_t k; /* of a row; 1 where all rows have one scale */
  const void* x;
  bool bfloat16; /* x holds these, else float32 */
  uint8_t* codes;
  float one_scale; /* where scales is NULL */
  float* scales;
  std::atomic<int32_t> status;
};

void encode_rows(Encoding* encoding, int64_t first, int64_t rows, const float* x) {
  const int64_t k = encoding->k, stride = k > 0 ? k : 1;
  uint8_t* codes = encoding->codes + first * k;
  const pk_status status =
      encoding->scales == nullptr
          ? kernels.encode_f8(encoding->format, rows * k, x, encoding->one_scale, codes)
          : kernels.quantize_rows_f8(encoding->format, rows, k, x, stride, codes, stride,
                                     encoding->scales + first);
  if (status != PK_OK) encoding->status = status;
}

void encode_part(int64_t begin, int64_t end, void* context) {
  Encoding* encoding = static_cast<Encoding*>(context);
  const int64_t k = encoding->k;
  if (!encoding->bfloat16) {
    encode_rows(encoding, begin, end - begin, static_cast<const float*>(encoding->x) + begin * k);
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(encoding->x);
  const int64_t step = k > 0 ? kChunk / k : end - begin;
  float floats[kChunk];
  for (int64_t row = begin; row < end; row += step) {
    const int64_t rows = end - row < step ? end - row : step;
    for (int64_t i = 0; i < rows * k; ++i) {
      const uint32_t bits = static_cast<uint32_t>(x[row * k + i]) << 16;
      memcpy(&floats[i], &bits, sizeof(bits));
    }
    encode_rows(encoding, row, rows, floats);
  }
}

/* An input as it can be encoded in rows of k: itself, or a copy in float32. */
View encodable(Call& call, const View& x, int64_t k) {
  const bool as_it_is = x.dtype == dtypes.bfloat16 && k <= kChunk;
  return call.dense(x, as_it_is ? dtypes.bfloat16 : dtypes.float32);
}

void encode_all(Call& call, const TorchExecutor& executor, int64_t m, Encoding* encoding) {
  if (call.failed() || m == 0) return;
  const int64_t k = encoding->k > 0 ? encoding->k : 1;
  executor.parallel_for(m, kGrain / k + 1, encode_part, encoding);
  if (encoding->status != PK_OK) {
    call.fail("policy_torch: expected a scale greater than 0 and finite, or NaN");
  }
}

struct Amax {
  const void* x;
  bool bfloat16;
  std::atomic<int32_t> bits; /* of the largest magnitude so far; those of a NaN are larger yet */
};

template <class Bits>
int32_t largest_magnitude(const void* x, int64_t begin, int64_t end, int32_t mask) {
  const Bits* values = static_cast<const Bits*>(x);
  int32_t largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int32_t magnitude = static_cast<int32_t>(values[i]) & mask;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

void amax_of_part(int64_t begin, int64_t end, void* context) {
  Amax* amax = static_cast<Amax*>(context);
  const int32_t found = amax->bfloat16
                            ? largest_magnitude<uint16_t>(amax->x, begin, end, 0x7fff) << 16
                            : largest_magnitude<uint32_t>(amax->x, begin, end, 0x7fffffff);
  int32_t before = amax->bits;
  while (before < found && !amax->bits.compare_exchange_weak(before, found)) {
  }
}

pk_format float8_kind(Call& call, int32_t dtype) {
  const pk_format format = code_kind(dtype);
  if (format != PK_F8_E4M3FN && format != PK_F8_E5M2) {
    call.fail("policy_torch: expected float8_e4m3fn or float8_e5m2");
  }
  return format;
}

int64_t rows_of(const View& view) {
  int64_t m = 1;
  for (int64_t i = 0; i < view.dim - 1; ++i) m *= view.sizes[i];
  return m;
}

}  // namespace

View encoded(Call& call, const TorchExecutor& executor, const View& x, const View& scale,
             pk_format format) {
  if (scale.elements != 1 || scale.dtype != dtypes.float32) {
    call.fail("policy_torch: expected one scale in float32, got %lld elements",
              static_cast<long long>(scale.elements));
  }
  const View floats = encodable(call, x, 1);
  const int32_t dtype = format == PK_F8_E4M3FN ? dtypes.float8_e4m3fn : dtypes.float8_e5m2;
  const View codes = call.empty(x.dim, x.sizes, dtype);
  uint8_t* out = static_cast<uint8_t*>(call.data_of(codes));
  if (call.failed()) return codes;
  Encoding encoding = {
      format,  1,      floats.data, floats.dtype == dtypes.bfloat16, out, *scale.as<float>(),
      nullptr, {PK_OK}};
  encode_all(call, executor, x.elements, &encoding);
  return codes;
}

View quantized_rows(Call& call, const TorchExecutor& executor, const View& x, View* scale) {
  if (x.dim < 1) call.fail("policy_torch: expected rows, got a tensor without axes");
  const View floats = encodable(call, x, x.last());
  const View codes = call.empty(x.dim, x.sizes, dtypes.float8_e4m3fn);
  const int64_t m = rows_of(x);
  *scale = call.empty(1, &m, dtypes.float32);
  uint8_t* out = static_cast<uint8_t*>(call.data_of(codes));
  float* scales = static_cast<float*>(call.data_of(*scale));
  if (call.failed()) return codes;
  Encoding encoding = {PK_F8_E4M3FN, x.last(), floats.data, floats.dtype == dtypes.bfloat16,
                       out,          0,        scales,      {PK_OK}};
  encode_all(call, executor, m, &encoding);
  return codes;
}

/* (x, scale, dtype) */
void encode_f8(Call& call) {
  const View x = call.tensor(0), scale = call.tensor(1);
  const pk_format format = float8_kind(call, call.dtype(2));
  call.give(0, encoded(call, TorchExecutor(), x, scale, format));
}

/* (x, dtype) */
void scale_f8(Call& call) {
  const View x = call.tensor(0), floats = encodable(call, x, 1);
  const pk_format format = float8_kind(call, call.dtype(1));
  const View scale = call.empty(0, nullptr, dtypes.float32);
  float* out = static_cast<float*>(call.data_of(scale));
  if (call.failed()) return;
  Amax amax = {floats.data, floats.dtype == dtypes.bfloat16, {0}};
  TorchExecutor().parallel_for(floats.elements, kGrain, amax_of_part, &amax);
  const int32_t bits = amax.bits;
  float value;
  uint8_t code;
  memcpy(&value, &bits, sizeof(bits));
  /* A row of the largest value alone has the tensor's scale. */
  call.check(kernels.quantize_rows_f8(format, 1, 1, &value, 1, &code, 1, out));
  call.give(0, scale);
}

/* (x) */
void quantize_rows_f8(Call& call) {
  View scale = {};
  const View codes = quantized_rows(call, TorchExecutor(), call.tensor(0), &scale);
  call.give(0, codes);
  call.give(1, scale);
}

/* (packed, n, k, codes) */
void unpack(Call& call) {
  const View packed = call.tensor(0);
  const int64_t n = call.integer(1), k = call.integer(2);
  const int32_t dtype = call.dtype(3);
  Weight weight;
  const void* w = weight.packed(call, packed, n, k);
  const int64_t sizes[2] = {n, k};
  const View codes = call.empty(2, sizes, dtype);
  void* out = call.data_of(codes);
  if (call.failed()) return;
  call.check(
      kernels.unpack_on(TorchExecutor().get(), code_kind(dtype), n, k, w, out, k > 0 ? k : 1));
  call.give(0, codes);
}

/* (ids, packed, n, k, codes, scale, dtype) */
void packed_rows(Call& call) {
  View ids = call.tensor(0);
  const View packed = call.tensor(1), scale = call.tensor(5);
  const int64_t n = call.integer(2), k = call.integer(3);
  const int32_t dtype = call.dtype(6);
  if (scale.dtype != dtypes.float32 || (scale.elements != n && scale.elements != 1)) {
    call.fail("policy_torch: expected a scale in float32 of %lld elements or one, got %lld",
              static_cast<long long>(n), static_cast<long long>(scale.elements));
  }
  const int32_t inside = float_or_float32(dtype);
  ids = call.dense(ids, dtypes.int64);
  const View scales = call.dense(scale, dtypes.float32);
  Weight weight;
  const void* w = weight.packed(call, packed, n, k);
  const View y = call.empty_rows(ids, ids.dim, k, inside);
  void* out = call.data_of(y);
  if (call.failed()) return;
  const TorchExecutor executor;
  call.check(kernels.dequantize_packed_rows(
      executor.get(), ids.elements, ids.as<int64_t>(), code_kind(call.dtype(4)), n, k, w,
      scales.as<float>(), scale.elements == n ? 1 : 0, float_kind(inside), out, k > 0 ? k : 1));
  call.give(0, call.dense(y, dtype));
}
