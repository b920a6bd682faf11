#include "float_formats.h"
#include "scalar/scalar.h"

namespace pk {
namespace {

// Rounds half to even for |value| < 2^22, with nothing but additions, so that it vectorizes on
// every CPU: at 1.5 * 2^23 the unit in the last place of a float32 is 1.
inline float round_half_even(float value) {
  constexpr float kUnit = 0x1.8p23f;
  return (value + kUnit) - kUnit;
}

void quantize_row_s8(int64_t k, const float* x, float amax, int8_t* codes) {
  const float inverse = 127.0f / amax;
  for (int64_t i = 0; i < k; ++i) {
    float code = round_half_even(x[i] * inverse);
    code = code > -127.0f ? code : -127.0f;
    code = code < 127.0f ? code : 127.0f;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(code));
  }
}

template <class Format>
void encode_all(int64_t n, const float* x, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = encode<Format>(x[i], scale);
}

template <class Format>
void quantize_rows(int64_t m, int64_t k, const float* x, int64_t ldx, uint8_t* codes, int64_t ldq,
                   float* scale) {
  for (int64_t row = 0; row < m; ++row) {
    const float* values = x + row * ldx;
    uint8_t* out = codes + row * ldq;
    const uint32_t bits = amax_bits(k, values);
    if (bits >= kInfinityBits) {
      scale[row] = from_bits(kQuietNanBits);
      for (int64_t i = 0; i < k; ++i) out[i] = Format::kNan;
      continue;
    }
    const float amax = from_bits(bits) > kAmaxFloor ? from_bits(bits) : kAmaxFloor;
    scale[row] = amax / Format::kMax;
    encode_all<Format>(k, values, scale[row], out);
  }
}

}  // namespace

namespace scalar {

void quantize_rows_s8(int64_t m, int64_t k, const float* x, int64_t ldx, int8_t* codes, int64_t ldq,
                      float* scale) {
  for (int64_t row = 0; row < m; ++row) {
    const float* values = x + row * ldx;
    int8_t* out = codes + row * ldq;
    const uint32_t bits = amax_bits(k, values);
    if (bits >= kInfinityBits) {
      scale[row] = from_bits(kQuietNanBits);
      for (int64_t i = 0; i < k; ++i) out[i] = 0;
      continue;
    }
    const float amax = from_bits(bits) > kAmaxFloor ? from_bits(bits) : kAmaxFloor;
    scale[row] = amax / 127.0f;
    quantize_row_s8(k, values, amax, out);
  }
}

void encode_f8(pk_format format, int64_t n, const float* x, float scale, uint8_t* codes) {
  if (format == PK_F8_E4M3FN) {
    encode_all<E4M3FN>(n, x, scale, codes);
  } else {
    encode_all<E5M2>(n, x, scale, codes);
  }
}

void quantize_rows_f8(pk_format format, int64_t m, int64_t k, const float* x, int64_t ldx,
                      uint8_t* codes, int64_t ldq, float* scale) {
  if (format == PK_F8_E4M3FN) {
    quantize_rows<E4M3FN>(m, k, x, ldx, codes, ldq, scale);
  } else {
    quantize_rows<E5M2>(m, k, x, ldx, codes, ldq, scale);
  }
}

void decode_f8(pk_format format, int64_t n, const uint8_t* codes, float* y) {
  const DecodeTable& table = format == PK_F8_E4M3FN ? kDecodeE4M3FN : kDecodeE5M2;
  for (int64_t i = 0; i < n; ++i) y[i] = from_bits(table.bits[codes[i]]);
}

}  // namespace scalar
}  // namespace pk
