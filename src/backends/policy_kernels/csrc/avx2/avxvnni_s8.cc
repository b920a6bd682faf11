// int8 on AVX-VNNI: up to 2 rows by 4 vectors of 8 channels, or 6 rows by 2: at most 12 sums.
#include <immintrin.h>

#include <cstring>

#include "avx2/avx2.h"

namespace pk {
namespace {

struct Vector {
  using Type = __m256i;
  static constexpr int kBytes = 32;
  static Type zero() { return _mm256_setzero_si256(); }
  static Type load(const int8_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }
  static Type repeat(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static Type multiply_add(Type sums, Type x, Type w) {
    return _mm256_dpbusd_avx_epi32(sums, x, w);
  }
  static Type add(Type a, Type b) { return _mm256_add_epi32(a, b); }
  static void store(int32_t* to, Type sums) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sums);
  }
};

constexpr int kTileRows = 6;
constexpr int vectors(int rows) { return rows <= 2 ? 4 : 2; }

}  // namespace
}  // namespace pk

#include "vnni.inc"

namespace pk {

const ProductS8 avxvnni_s8 = {"avxvnni", kTileRows, TileCode::kOffset8, multiply};

}  // namespace pk
