// bfloat16 on AVX512-BF16. A vector of weights is 8 channels by two pairs of k, as the look-up
// leaves them (bytes.h); VDPBF16PS adds the two products of each pair, in float32, to the lane's
// sum. The other side is four k of a row, repeated. A pass takes the whole panel (4 vectors) with
// up to 3 rows, a half of it with up to 12: at most 24 sums in 32 registers. Decoding runs on other
// ports than the multiplications.
//
// Sums are moved to a second level, in memory, after kRun blocks, as in float32.inc.
#include <cstring>

#include "avx512/avx512.h"
#include "avx512/tile_bfloat16.h"

namespace pk {
namespace {

constexpr int kTileRows = 12;
constexpr int halves(int rows) { return rows <= 3 ? 2 : 1; }  // of the panel, in one pass
constexpr int64_t kRun = 2;

inline __m512bh repeat4(const uint16_t* from) {
  int64_t four;
  std::memcpy(&four, from, sizeof four);
  return (__m512bh)_mm512_set1_epi64(four);
}

template <class Code, int Rows, int Halves>
inline void add_run(int64_t blocks, const uint16_t* x, const int8_t* panel,
                    __m512 (*level)[2 * Halves]) {
  constexpr int64_t kAhead = 8 * kPanelBlockBytes;
  constexpr int kLines = (Rows * 2 + 15) / 16;  // cache lines of x for each k4
  __m512 totals[Rows][2 * Halves];
#pragma GCC unroll 16
  for (auto& row : totals) {
#pragma GCC unroll 16
    for (auto& total : row) total = _mm512_setzero_ps();
  }
  for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
    for (int k4 = 0; k4 < 16; ++k4) {
      // The next block of x: in so many rows, the processor does not foresee it.
#pragma GCC unroll 16
      for (int line = 0; line < kLines; ++line) {
        __builtin_prefetch(x + Rows * kBlock + (k4 * kLines + line) * 32);
      }
      Bfloat16s w[Halves];
#pragma GCC unroll 16
      for (int half = 0; half < Halves; ++half) {
        const int8_t* from = panel + half * (kPanelBlockBytes / 2) + k4 * 64;
        __builtin_prefetch(from + kAhead);
        w[half] = Code::decode(_mm512_load_si512(from));
      }
#pragma GCC unroll 12
      for (int row = 0; row < Rows; ++row) {
        const __m512bh values = repeat4(x + row * kBlock + k4 * 4);
#pragma GCC unroll 2
        for (int half = 0; half < Halves; ++half) {
          __m512* total = &totals[row][half * 2];
          total[0] = _mm512_dpbf16_ps(total[0], values, (__m512bh)w[half].first);
          total[1] = _mm512_dpbf16_ps(total[1], values, (__m512bh)w[half].second);
        }
      }
    }
    x += Rows * kBlock;
    panel += kPanelBlockBytes;
  }
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
    for (int v = 0; v < 2 * Halves; ++v) {
      level[row][v] = _mm512_add_ps(level[row][v], totals[row][v]);
    }
  }
}

// Lanes 4 q and 4 q + 1 of `first` are channel 4 q, the next two 4 q + 1; `second` follows.
inline __m512 channels(__m512 first, __m512 second) {
  const __m512 even = _mm512_shuffle_ps(first, second, 0x88);
  const __m512 odd = _mm512_shuffle_ps(first, second, 0xdd);
  return _mm512_add_ps(even, odd);
}

template <class Code, int Rows, int Halves>
inline void multiply_pass(int64_t blocks, const uint16_t* x, const int8_t* panel, float* sums) {
  __m512 level[Rows][2 * Halves];
#pragma GCC unroll 16
  for (auto& row : level) {
#pragma GCC unroll 16
    for (auto& total : row) total = _mm512_setzero_ps();
  }
  for (int64_t block = 0; block < blocks; block += kRun) {
    const int64_t run = blocks - block < kRun ? blocks - block : kRun;
    add_run<Code, Rows, Halves>(run, x + block * Rows * kBlock, panel + block * kPanelBlockBytes,
                                level);
  }
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 16
    for (int half = 0; half < Halves; ++half) {
      _mm512_storeu_ps(sums + row * kPanel + half * 16,
                       channels(level[row][half * 2], level[row][half * 2 + 1]));
    }
  }
}

template <class Code, int Rows>
void multiply_rows(int64_t blocks, const uint16_t* x, const int8_t* panel, float* sums) {
  constexpr int kHalves = halves(Rows);
  for (int half = 0; half < 2; half += kHalves) {
    multiply_pass<Code, Rows, kHalves>(blocks, x, panel + half * (kPanelBlockBytes / 2),
                                       sums + half * 16);
  }
}

template <class Code>
void multiply_any(int64_t rows, int64_t blocks, const void* tile, const int8_t* panel,
                  float* sums) {
  static constexpr decltype(&multiply_rows<Code, 1>) kFunctions[kTileRows] = {
      multiply_rows<Code, 1>,  multiply_rows<Code, 2>,  multiply_rows<Code, 3>,
      multiply_rows<Code, 4>,  multiply_rows<Code, 5>,  multiply_rows<Code, 6>,
      multiply_rows<Code, 7>,  multiply_rows<Code, 8>,  multiply_rows<Code, 9>,
      multiply_rows<Code, 10>, multiply_rows<Code, 11>, multiply_rows<Code, 12>,
  };
  kFunctions[rows - 1](blocks, static_cast<const uint16_t*>(tile), panel, sums);
}

void multiply(pk_format code, int64_t rows, int64_t blocks, const void* tile, const int8_t* panel,
              float* sums) {
  if (code == PK_S8) {
    multiply_any<CodeS8>(rows, blocks, tile, panel, sums);
  } else if (code == PK_F8_E4M3FN) {
    multiply_any<CodeF8<E4M3FN>>(rows, blocks, tile, panel, sums);
  } else {
    multiply_any<CodeF8<E5M2>>(rows, blocks, tile, panel, sums);
  }
}

}  // namespace

const ProductBfloat16 avx512bf16_bfloat16 = {
    {"avx512bf16", kTileRows, multiply}, tile_bfloat16, tile_decoded};

}  // namespace pk
