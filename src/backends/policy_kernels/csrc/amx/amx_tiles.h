// The few AMX tile operations that the kernels use, as functions of a tile's number.
//
// With PK_EMULATE_AMX they are plain C++ over an array, so that the same kernels run, and are
// tested, on CPUs without AMX.
//
// The real ones are inline assembly: gcc 12 declares 8 of the 64 bytes of a configuration as the
// input of _tile_loadconfig, so that stores to the others vanish, and its tile loads do not say
// that they read memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace pk {
namespace {

// Intel SDM, volume 1, section 18.6: the operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

#ifdef PK_EMULATE_AMX

struct EmulatedTiles {
  TileConfig config;
  uint8_t bytes[8][16][64];
};
thread_local EmulatedTiles tiles;

inline void tile_configure(const TileConfig& config) { tiles.config = config; }
inline void tile_release() { std::memset(&tiles, 0xee, sizeof tiles); }

template <int Tile>
inline void tile_zero() {
  std::memset(tiles.bytes[Tile], 0, sizeof tiles.bytes[Tile]);
}

template <int Tile>
inline void tile_load(const void* from, int64_t stride) {
  std::memset(tiles.bytes[Tile], 0, sizeof tiles.bytes[Tile]);
  for (int row = 0; row < tiles.config.rows[Tile]; ++row) {
    std::memcpy(tiles.bytes[Tile][row], static_cast<const char*>(from) + row * stride,
                tiles.config.row_bytes[Tile]);
  }
}

template <int Tile>
inline void tile_store(void* to, int64_t stride) {
  for (int row = 0; row < tiles.config.rows[Tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles.bytes[Tile][row],
                tiles.config.row_bytes[Tile]);
  }
}

// sums[m][n] += four products of int8 for each row of w
template <int Sums, int X, int W>
inline void tile_multiply_s8() {
  for (int m = 0; m < tiles.config.rows[Sums]; ++m) {
    for (int n = 0; n < tiles.config.row_bytes[Sums] / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, tiles.bytes[Sums][m] + n * 4, 4);
      for (int k4 = 0; k4 < tiles.config.rows[W]; ++k4) {
        for (int i = 0; i < 4; ++i) {
          const int x = static_cast<int8_t>(tiles.bytes[X][m][k4 * 4 + i]);
          const int w = static_cast<int8_t>(tiles.bytes[W][k4][n * 4 + i]);
          sum += static_cast<uint32_t>(x * w);
        }
      }
      std::memcpy(tiles.bytes[Sums][m] + n * 4, &sum, 4);
    }
  }
}

inline float emulated_bfloat16(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  // Subnormal operands are taken for 0.
  if ((half & 0x7f80u) == 0) half &= 0x8000u;
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// sums[m][n] += two products of bfloat16 for each row of w
template <int Sums, int X, int W>
inline void tile_multiply_bfloat16() {
  for (int m = 0; m < tiles.config.rows[Sums]; ++m) {
    for (int n = 0; n < tiles.config.row_bytes[Sums] / 4; ++n) {
      float sum;
      std::memcpy(&sum, tiles.bytes[Sums][m] + n * 4, 4);
      for (int k2 = 0; k2 < tiles.config.rows[W]; ++k2) {
        for (int i = 1; i >= 0; --i) {
          const float x = emulated_bfloat16(tiles.bytes[X][m] + k2 * 4 + i * 2);
          const float w = emulated_bfloat16(tiles.bytes[W][k2] + n * 4 + i * 2);
          sum = __builtin_fmaf(x, w, sum);
        }
      }
      std::memcpy(tiles.bytes[Sums][m] + n * 4, &sum, 4);
    }
  }
}

#else

inline void tile_configure(const TileConfig& config) {
  __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
inline void tile_release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int Tile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Tile>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(stride), "i"(Tile)
                   : "memory");
}

template <int Tile>
inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

template <int Sums, int X, int W>
inline void tile_multiply_s8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(X), "i"(W));
}

template <int Sums, int X, int W>
inline void tile_multiply_bfloat16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(X), "i"(W));
}

#endif

// Tiles 0 to 3 are sums: (rows 0-15, 16-31) by (channels 0-15, 16-31). 4 and 5 are x, 6 and 7 w.
inline TileConfig tile_config(int rows) {
  TileConfig config;
  std::memset(&config, 0, sizeof config);
  const uint8_t upper = static_cast<uint8_t>(rows < 16 ? rows : 16);
  // A tile must have a row; where there are none it is not used.
  const uint8_t lower = static_cast<uint8_t>(rows > 16 ? rows - 16 : 1);
  const uint8_t tile_rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = tile_rows[tile];
    config.row_bytes[tile] = 64;
  }
  return config;
}

}  // namespace
}  // namespace pk
