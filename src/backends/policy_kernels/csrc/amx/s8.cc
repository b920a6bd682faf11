// int8 on AMX: two tiles of rows by two of channels. A block of a panel is two tiles of weights as
// it lies, a block of a tile of x is one or two tiles of 64 bytes a row, so each step loads four
// tiles and multiplies four times (16 rows x 16 channels x 64 k each).
//
// Tiles are configured on entry and released on exit, whatever the thread did with them before:
// other libraries do the same, and the state costs time at every switch of threads.
#include "amx/amx.h"
#include "amx/amx_tiles.h"

namespace pk {
namespace {

constexpr int64_t kTileRows = 32;
constexpr int64_t kSumStride = kPanel * 4;
constexpr int64_t kHalfBytes = kPanelBlockBytes / 2;

// Beyond the block at hand, in the stream of weights from the third level cache or memory.
inline void prefetch(const int8_t* panel) {
  for (int64_t line = 0; line < kPanelBlockBytes; line += 64)
    __builtin_prefetch(panel + line, 0, 2);
}

void multiply_two(int64_t rows, int64_t blocks, const int8_t* x, const int8_t* panel,
                  int32_t* sums) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t block = 0; block < blocks; ++block) {
    prefetch(panel + 4 * kPanelBlockBytes);
    tile_load<6>(panel, 64);
    tile_load<4>(x, kBlock);
    tile_load<7>(panel + kHalfBytes, 64);
    tile_multiply_s8<0, 4, 6>();
    tile_load<5>(x + 16 * kBlock, kBlock);
    tile_multiply_s8<1, 4, 7>();
    tile_multiply_s8<2, 5, 6>();
    tile_multiply_s8<3, 5, 7>();
    x += rows * kBlock;
    panel += kPanelBlockBytes;
  }
  tile_store<0>(sums, kSumStride);
  tile_store<1>(sums + 16, kSumStride);
  tile_store<2>(sums + 16 * kPanel, kSumStride);
  tile_store<3>(sums + 16 * kPanel + 16, kSumStride);
}

void multiply_one(int64_t rows, int64_t blocks, const int8_t* x, const int8_t* panel,
                  int32_t* sums) {
  tile_zero<0>(), tile_zero<1>();
  for (int64_t block = 0; block < blocks; ++block) {
    prefetch(panel + 4 * kPanelBlockBytes);
    tile_load<4>(x, kBlock);
    tile_load<6>(panel, 64);
    tile_load<7>(panel + kHalfBytes, 64);
    tile_multiply_s8<0, 4, 6>();
    tile_multiply_s8<1, 4, 7>();
    x += rows * kBlock;
    panel += kPanelBlockBytes;
  }
  tile_store<0>(sums, kSumStride);
  tile_store<1>(sums + 16, kSumStride);
}

void multiply(int64_t rows, int64_t blocks, const void* tile, const int8_t* panel, int32_t* sums) {
  tile_configure(tile_config(static_cast<int>(rows)));
  const int8_t* x = static_cast<const int8_t*>(tile);
  if (rows > 16) {
    multiply_two(rows, blocks, x, panel, sums);
  } else {
    multiply_one(rows, blocks, x, panel, sums);
  }
  tile_release();
}

}  // namespace

const ProductS8 amx_s8 = {"amx", kTileRows, TileCode::kSigned8, multiply};

}  // namespace pk
