// bfloat16 on AMX: some blocks of the panel are decoded into tiles of weights, [2][16 pairs of
// k][16 channels][2] for 32 k, and then serve up to 128 rows, two tiles of 16 at a time.
#include "amx/amx.h"
#include "amx/amx_tiles.h"
#include "avx512/tile_bfloat16.h"

namespace pk {
namespace {

constexpr int64_t kTileRows = 128;
constexpr int64_t kStepRows = 32;
constexpr int64_t kDecodedBlocks = 8;  // 32 KiB of decoded weights
constexpr int64_t kDecodedBytes = 2 * kPanelBlockBytes;
constexpr int64_t kSumStride = kPanel * 4;

// One block: 16 lines of 4 k in each half become 2 * 16 lines of 2 k. The look-up leaves, in each
// quarter, [channel][k 01, k 23]; even 32 bit words are then the one line and odd words the other.
template <class Code>
void decode_block(const int8_t* block, char* tiles) {
  const __m512i even = _mm512_setr_epi32(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t k4 = 0; k4 < 16; ++k4) {
      const Bfloat16s values =
          Code::decode(_mm512_load_si512(block + half * (kPanelBlockBytes / 2) + k4 * 64));
      // Tiles lie [32 k][half]; a tile has 8 lines of four k.
      char* line = tiles + (k4 / 8 * 2 + half) * 1024 + k4 % 8 * 128;
      _mm512_store_si512(line, _mm512_permutex2var_epi32(values.first, even, values.second));
      _mm512_store_si512(line + 64, _mm512_permutex2var_epi32(values.first, odd, values.second));
    }
  }
}

void add_rows(int64_t step_rows, int64_t rows, int64_t blocks, const uint16_t* x, const char* w,
              float* sums) {
  const int64_t stride = kBlock * 2;
  tile_load<0>(sums, kSumStride);
  tile_load<1>(sums + 16, kSumStride);
  if (step_rows > 16) {
    tile_load<2>(sums + 16 * kPanel, kSumStride);
    tile_load<3>(sums + 16 * kPanel + 16, kSumStride);
  }
  for (int64_t block = 0; block < blocks; ++block, x += rows * kBlock) {
    for (int64_t part = 0; part < 2; ++part, w += 2048) {
      tile_load<4>(x + part * 32, stride);
      tile_load<6>(w, 64);
      tile_load<7>(w + 1024, 64);
      tile_multiply_bfloat16<0, 4, 6>();
      tile_multiply_bfloat16<1, 4, 7>();
      if (step_rows > 16) {
        tile_load<5>(x + part * 32 + 16 * kBlock, stride);
        tile_multiply_bfloat16<2, 5, 6>();
        tile_multiply_bfloat16<3, 5, 7>();
      }
    }
  }
  tile_store<0>(sums, kSumStride);
  tile_store<1>(sums + 16, kSumStride);
  if (step_rows > 16) {
    tile_store<2>(sums + 16 * kPanel, kSumStride);
    tile_store<3>(sums + 16 * kPanel + 16, kSumStride);
  }
}

template <class Code>
void multiply_as(int64_t rows, int64_t blocks, const uint16_t* x, const int8_t* panel,
                 float* sums) {
  alignas(64) char decoded[kDecodedBlocks * kDecodedBytes];
  alignas(64) float run[kTileRows * kPanel];
  std::memset(sums, 0, static_cast<size_t>(rows * kSumStride));
  for (int64_t first = 0; first < blocks; first += kDecodedBlocks) {
    const int64_t count = blocks - first < kDecodedBlocks ? blocks - first : kDecodedBlocks;
    for (int64_t block = 0; block < count; ++block) {
      decode_block<Code>(panel + (first + block) * kPanelBlockBytes,
                         decoded + block * kDecodedBytes);
    }
    // Short sums, added to the rest in float32: see kRun in float32.inc.
    std::memset(run, 0, static_cast<size_t>(rows * kSumStride));
    for (int64_t row = 0; row < rows; row += kStepRows) {
      const int64_t step_rows = rows - row < kStepRows ? rows - row : kStepRows;
      if (row == 0 || step_rows < kStepRows) {
        tile_configure(tile_config(static_cast<int>(step_rows)));
      }
      add_rows(step_rows, rows, count, x + (first * rows + row) * kBlock, decoded,
               run + row * kPanel);
    }
    for (int64_t i = 0; i < rows * kPanel; ++i) sums[i] += run[i];
  }
  tile_release();
}

void multiply(pk_format code, int64_t rows, int64_t blocks, const void* tile, const int8_t* panel,
              float* sums) {
  const uint16_t* x = static_cast<const uint16_t*>(tile);
  if (code == PK_S8) {
    multiply_as<CodeS8>(rows, blocks, x, panel, sums);
  } else if (code == PK_F8_E4M3FN) {
    multiply_as<CodeF8<E4M3FN>>(rows, blocks, x, panel, sums);
  } else {
    multiply_as<CodeF8<E5M2>>(rows, blocks, x, panel, sums);
  }
}

}  // namespace

const ProductBfloat16 amx_bfloat16 = {{"amx", kTileRows, multiply}, tile_bfloat16, tile_decoded};

}  // namespace pk
