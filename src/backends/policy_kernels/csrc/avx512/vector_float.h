// float32 vectors of AVX-512: 4 channels by 4 k.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace pk {
namespace {

struct Vector {
  using Type = __m512;
  static constexpr int kLanes = 16;
  static Type zero() { return _mm512_setzero_ps(); }
  static Type load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Type values) { _mm512_storeu_ps(to, values); }
  static Type add(Type a, Type b) { return _mm512_add_ps(a, b); }
  static Type repeat4(const float* from) { return _mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
  static Type multiply_add(Type sums, Type x, Type w) { return _mm512_fmadd_ps(x, w, sums); }
};

// With up to 2 rows a pass takes the whole panel, 8 sums a row; with up to 6 a half: at most 24
// sums in 32 registers.
constexpr int kTileRows = 6;
constexpr int vectors(int rows) { return rows <= 2 ? 8 : 4; }

inline __m128i load16(const int8_t* from) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(from));
}

}  // namespace
}  // namespace pk
