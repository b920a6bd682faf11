// float32 on AVX-512 with byte permutations: 64 codes are looked up as bfloat16 at once (bytes.h),
// and a bfloat16 becomes a float32 when zeros are put below it.
#include "avx512/avx512.h"
#include "avx512/bytes.h"
#include "avx512/vector_float.h"

namespace pk {
namespace {

constexpr int kGroup = 4;

// Vector 2 i + j has, in quarter q, the j-th channel of `first` (i = 0) or `second` (i = 1) of that
// quarter, so channel 4 q + 2 i + j of the 16.
template <class Format>
struct Looked {
  static void decode(const int8_t* from, __m512* w) {
    const Bfloat16s values = CodeF8<Format>::decode(_mm512_load_si512(from));
    const __m512i zero = _mm512_setzero_si512();
    w[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, values.first));
    w[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, values.first));
    w[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, values.second));
    w[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, values.second));
  }
  static constexpr int channel(int v, int quarter) { return quarter * 4 + v; }
};

struct DecodeS8 {
  static void decode(const int8_t* from, __m512* w) {
    for (int v = 0; v < kGroup; ++v) {
      w[v] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(from + 16 * v)));
    }
  }
  static constexpr int channel(int v, int quarter) { return v * 4 + quarter; }
};

using DecodeE4M3FN = Looked<E4M3FN>;
using DecodeE5M2 = Looked<E5M2>;

}  // namespace
}  // namespace pk

#include "float32.inc"

namespace pk {

const ProductFloat avx512vbmi_float32 = {"avx512bf16", kTileRows, multiply};

}  // namespace pk
