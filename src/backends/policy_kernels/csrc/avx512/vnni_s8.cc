// int8 on AVX512-VNNI: 12 rows by 2 vectors of 16 channels are 24 of the 32 registers, and 14 loads
// serve 24 multiplications.
#include <immintrin.h>

#include <cstring>

#include "avx512/avx512.h"

namespace pk {
namespace {

struct Vector {
  using Type = __m512i;
  static constexpr int kBytes = 64;
  static Type zero() { return _mm512_setzero_si512(); }
  static Type load(const int8_t* from) { return _mm512_load_si512(from); }
  static Type repeat(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static Type multiply_add(Type sums, Type x, Type w) { return _mm512_dpbusd_epi32(sums, x, w); }
  static Type add(Type a, Type b) { return _mm512_add_epi32(a, b); }
  static void store(int32_t* to, Type sums) { _mm512_storeu_si512(to, sums); }
};

constexpr int kTileRows = 12;
constexpr int vectors(int) { return 2; }

}  // namespace
}  // namespace pk

#include "vnni.inc"

namespace pk {

const ProductS8 avx512vnni_s8 = {"avx512vnni", kTileRows, TileCode::kOffset8, multiply};

}  // namespace pk
