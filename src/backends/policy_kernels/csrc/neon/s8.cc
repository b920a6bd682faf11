// int8 on NEON's SDOT, which multiplies signed by signed: nothing to correct. A vector of weights
// is 4 channels by 4 k; the instruction takes the four k of a row out of a quarter of a vector of
// x, so that one load of x (16 k) serves four steps.
//
// Registers: 4 rows by 4 vectors of channels (a half of the panel) are 16 sums, with 4 vectors of
// weights and 4 of x, of 32.
#include <arm_neon.h>

#include "neon/neon.h"

namespace pk {
namespace {

constexpr int kTileRows = 4;
constexpr int kVectors = 4;

template <int Rows, int Quarter>
inline void multiply_k4(const int8x16_t* x, const int8_t* weights, int32x4_t (*totals)[kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int8x16_t w = vld1q_s8(weights + v * 16);
#pragma GCC unroll 4
    for (int row = 0; row < Rows; ++row) {
      totals[row][v] = vdotq_laneq_s32(totals[row][v], w, x[row], Quarter);
    }
  }
}

template <int Rows>
inline void multiply_half(int64_t blocks, const int8_t* x, const int8_t* half, int32_t* sums) {
  constexpr int64_t kAhead = 8 * kPanelBlockBytes;
  int32x4_t totals[Rows][kVectors];
#pragma GCC unroll 4
  for (auto& row : totals) {
#pragma GCC unroll 4
    for (auto& total : row) total = vdupq_n_s32(0);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    for (int k16 = 0; k16 < 4; ++k16) {
      const int8_t* weights = half + k16 * 256;
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) __builtin_prefetch(weights + kAhead + line * 64);
      int8x16_t values[Rows];
#pragma GCC unroll 4
      for (int row = 0; row < Rows; ++row) values[row] = vld1q_s8(x + row * kBlock + k16 * 16);
      multiply_k4<Rows, 0>(values, weights, totals);
      multiply_k4<Rows, 1>(values, weights + 64, totals);
      multiply_k4<Rows, 2>(values, weights + 128, totals);
      multiply_k4<Rows, 3>(values, weights + 192, totals);
    }
    x += Rows * kBlock;
    half += kPanelBlockBytes;
  }
#pragma GCC unroll 4
  for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) vst1q_s32(sums + row * kPanel + v * 4, totals[row][v]);
  }
}

template <int Rows>
void multiply_rows(int64_t blocks, const int8_t* x, const int8_t* panel, int32_t* sums) {
  multiply_half<Rows>(blocks, x, panel, sums);
  multiply_half<Rows>(blocks, x, panel + kPanelBlockBytes / 2, sums + 16);
}

void multiply(int64_t rows, int64_t blocks, const void* tile, const int8_t* panel, int32_t* sums) {
  static constexpr decltype(&multiply_rows<1>) kFunctions[kTileRows] = {
      multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>};
  kFunctions[rows - 1](blocks, static_cast<const int8_t*>(tile), panel, sums);
}

}  // namespace

const ProductS8 neon_s8 = {"neon", kTileRows, TileCode::kSigned8, multiply};

}  // namespace pk
