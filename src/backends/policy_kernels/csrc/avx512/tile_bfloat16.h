// Rows of x as bfloat16, for the products on VDPBF16PS and on AMX.
#pragma once

#include "avx512/bytes.h"
#include "kernels.h"

namespace pk {
namespace {

// The instructions take subnormal operands for 0 and turn subnormal results into 0. With |x| at or
// above this, products with any code are normal, and what a sum can lose is below its rounding.
constexpr uint16_t kSmallestSafe = (127 - 80) << 7;  // 2^-80 as a bfloat16

bool tile_bfloat16(int64_t k, const uint16_t* x, uint16_t* row, int64_t stride) {
  bool safe = true;
  for (int64_t start = 0; start < k; start += kBlock, row += stride) {
    const int64_t length = k - start < kBlock ? k - start : kBlock;
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t rest = length - i * 32;
      const __mmask32 mask = rest >= 32 ? ~0u : rest <= 0 ? 0u : (1u << rest) - 1u;
      const __m512i values = _mm512_maskz_loadu_epi16(mask, x + start + i * 32);
      const __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
      // 0 becomes the largest number, so it is not small.
      const __m512i less_one = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1));
      safe = safe && _mm512_cmplt_epu16_mask(less_one, _mm512_set1_epi16(kSmallestSafe - 1)) == 0;
      _mm512_storeu_si512(row + i * 32, values);
    }
  }
  return safe;
}

template <class Format>
void tile_decoded_as(int64_t k, const uint8_t* x, uint16_t* row, int64_t stride) {
  // Quarters of both registers alternate: the numbers count 64 bit words, 8 and up in the second.
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t start = 0; start < k; start += kBlock, row += stride) {
    const int64_t rest = k - start;
    const __mmask64 mask = rest >= kBlock ? ~0ull : (1ull << rest) - 1ull;
    const __m512i codes = _mm512_maskz_loadu_epi8(mask, x + start);
    const Bfloat16s values = CodeF8<Format>::decode(codes);
    _mm512_storeu_si512(row, _mm512_permutex2var_epi64(values.first, low, values.second));
    _mm512_storeu_si512(row + 32, _mm512_permutex2var_epi64(values.first, high, values.second));
  }
}

void tile_decoded(pk_format format, int64_t k, const uint8_t* x, uint16_t* row, int64_t stride) {
  if (format == PK_F8_E4M3FN) {
    tile_decoded_as<E4M3FN>(k, x, row, stride);
  } else {
    tile_decoded_as<E5M2>(k, x, row, stride);
  }
}

}  // namespace
}  // namespace pk
