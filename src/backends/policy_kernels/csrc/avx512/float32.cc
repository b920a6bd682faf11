// float32 on AVX-512 without byte permutations: the float8 formats go through float16, as in
// avx2/float32.cc.
#include "avx512/avx512.h"
#include "avx512/vector_float.h"

namespace pk {
namespace {

constexpr int kGroup = 1;

struct DecodeS8 {
  static void decode(const int8_t* from, __m512* w) {
    w[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(from)));
  }
  static constexpr int channel(int, int quarter) { return quarter; }
};

struct DecodeE5M2 {
  static void decode(const int8_t* from, __m512* w) {
    w[0] = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(from)), 8));
  }
  static constexpr int channel(int, int quarter) { return quarter; }
};

struct DecodeE4M3FN {
  static void decode(const int8_t* from, __m512* w) {
    const __m256i wide = _mm256_cvtepi8_epi16(load16(from));
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    const __m256i bits = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
    const __m256i half =
        _mm256_mask_blend_epi16(nan, bits, _mm256_or_si256(bits, _mm256_set1_epi16(0x7e00)));
    w[0] = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  }
  static constexpr int channel(int, int quarter) { return quarter; }
};

}  // namespace
}  // namespace pk

#include "float32.inc"

namespace pk {

const ProductFloat avx512_float32 = {"avx512", kTileRows, multiply};

}  // namespace pk
