// int8 on AVX2: codes of both sides are widened to int16, and VPMADDWD adds two products exactly.
// (VPMADDUBSW, on bytes, saturates.)
//
// A vector of weights is 4 channels by 4 k; each of its 8 lanes sums two of the four k. One pass
// takes `groups` such vectors: 4 with up to 2 rows, 2 with up to 6, so at most 12 sums, 2 vectors
// of weights, a vector of x and one of products in 16 registers.
#include <immintrin.h>

#include <cstring>

#include "avx2/avx2.h"

namespace pk {
namespace {

constexpr int kTileRows = 6;
constexpr int kPanelGroups = 8;
constexpr int groups(int rows) { return rows <= 2 ? 4 : 2; }

inline __m256i weights_at(const int8_t* block, int k4, int group) {
  const int8_t* from = block + group / 4 * (kPanelBlockBytes / 2) + k4 * 64 + group % 4 * 16;
  return _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
}

inline __m256i repeat(const int16_t* from) {
  int64_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_set1_epi64x(four);
}

template <int Rows, int Groups>
inline void multiply_pass(int64_t blocks, const int16_t* x, const int8_t* panel, int first,
                          int32_t* sums) {
  constexpr int64_t kAhead = 8 * kPanelBlockBytes;
  __m256i totals[Rows][Groups];
#pragma GCC unroll 16
  for (auto& row : totals) {
#pragma GCC unroll 16
    for (auto& total : row) total = _mm256_setzero_si256();
  }
  for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
    for (int k4 = 0; k4 < 16; ++k4) {
      __builtin_prefetch(panel + kAhead + k4 * 64);
      __builtin_prefetch(panel + kAhead + kPanelBlockBytes / 2 + k4 * 64);
      // The next block of x: in so many rows, the processor does not foresee it.
      __builtin_prefetch(x + Rows * kBlock + k4 * 32);
      __m256i w[Groups];
#pragma GCC unroll 16
      for (int group = 0; group < Groups; ++group) w[group] = weights_at(panel, k4, first + group);
#pragma GCC unroll 8
      for (int row = 0; row < Rows; ++row) {
        const __m256i value = repeat(x + row * kBlock + k4 * 4);
#pragma GCC unroll 8
        for (int group = 0; group < Groups; ++group) {
          const __m256i products = _mm256_madd_epi16(value, w[group]);
          totals[row][group] = _mm256_add_epi32(totals[row][group], products);
        }
      }
    }
    x += Rows * kBlock;
    panel += kPanelBlockBytes;
  }
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
    for (int group = 0; group < Groups; ++group) {
      // Lanes 2 i and 2 i + 1 belong to channel i.
      const __m256i total = totals[row][group];
      const __m128i low = _mm256_castsi256_si128(total);
      const __m128i channels = _mm_hadd_epi32(low, _mm256_extracti128_si256(total, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + row * kPanel + (first + group) * 4),
                       channels);
    }
  }
}

template <int Rows>
void multiply_rows(int64_t blocks, const int16_t* x, const int8_t* panel, int32_t* sums) {
  constexpr int kGroups = groups(Rows);
  for (int first = 0; first < kPanelGroups; first += kGroups) {
    multiply_pass<Rows, kGroups>(blocks, x, panel, first, sums);
  }
}

void multiply(int64_t rows, int64_t blocks, const void* tile, const int8_t* panel, int32_t* sums) {
  static constexpr decltype(&multiply_rows<1>) kFunctions[kTileRows] = {
      multiply_rows<1>, multiply_rows<2>, multiply_rows<3>,
      multiply_rows<4>, multiply_rows<5>, multiply_rows<6>,
  };
  kFunctions[rows - 1](blocks, static_cast<const int16_t*>(tile), panel, sums);
}

}  // namespace

const ProductS8 avx2_s8 = {"avx2", kTileRows, TileCode::kSigned16, multiply};

}  // namespace pk
