// float32 on AVX2 and FMA: a vector is 2 channels by 4 k. One row takes 8 vectors in a pass (a half
// of the panel), 2 rows take 4, up to 6 take 2: at most 12 sums in 16 registers. The float8 formats
// go through float16, whose exponent has as many bits as e5m2's and one more than e4m3fn's.
#include <immintrin.h>

#include <cstring>

#include "avx2/avx2.h"

namespace pk {
namespace {

struct Vector {
  using Type = __m256;
  static constexpr int kLanes = 8;
  static Type zero() { return _mm256_setzero_ps(); }
  static Type load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Type values) { _mm256_storeu_ps(to, values); }
  static Type add(Type a, Type b) { return _mm256_add_ps(a, b); }
  static Type repeat4(const float* from) {
    return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
  }
  static Type multiply_add(Type sums, Type x, Type w) { return _mm256_fmadd_ps(x, w, sums); }
};

constexpr int kTileRows = 6;
constexpr int kGroup = 1;
constexpr int vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

inline __m128i load8(const int8_t* from) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
}

struct DecodeS8 {
  static void decode(const int8_t* from, __m256* w) {
    w[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(from)));
  }
  static constexpr int channel(int, int quarter) { return quarter; }
};

// e5m2 is the upper half of a float16.
struct DecodeE5M2 {
  static void decode(const int8_t* from, __m256* w) {
    w[0] = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load8(from)), 8));
  }
  static constexpr int channel(int, int quarter) { return quarter; }
};

// Shifted into a float16, e4m3fn's value is too small by the difference of the biases, 2^8; float16
// holds its subnormals too. The largest magnitude stands for NaN.
struct DecodeE4M3FN {
  static void decode(const int8_t* from, __m256* w) {
    const __m128i wide = _mm_cvtepi8_epi16(load8(from));  // the sign fills the upper byte
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    const __m128i bits = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));
    const __m128i half = _mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    w[0] = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  }
  static constexpr int channel(int, int quarter) { return quarter; }
};

}  // namespace
}  // namespace pk

#include "float32.inc"

namespace pk {

const ProductFloat avx2_float32 = {"avx2", kTileRows, multiply};

}  // namespace pk
