// int8 on SDOT, whose operands are both signed: nothing is added to the codes of x. A vector is 4
// channels by 4 k. One or two rows take all 8 vectors of a k4 in a pass, up to 4 rows take 4, up to
// 8 take 2: at most 16 sums, 8 vectors of weights and one of x in 32 registers.
#include <arm_neon.h>

#include <cstring>

#include "neon/neon.h"

namespace pk {
namespace {

struct Vector {
  using Type = int32x4_t;
  static constexpr int kBytes = 16;
  static Type zero() { return vdupq_n_s32(0); }
  static Type load(const int8_t* from) { return vreinterpretq_s32_s8(vld1q_s8(from)); }
  static Type repeat(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return vdupq_n_s32(four);
  }
  static Type multiply_add(Type sums, Type x, Type w) {
    return vdotq_s32(sums, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(w));
  }
  static Type add(Type a, Type b) { return vaddq_s32(a, b); }
  static void store(int32_t* to, Type sums) { vst1q_s32(to, sums); }
};

constexpr int kTileRows = 8;
constexpr int vectors(int rows) { return rows <= 2 ? 8 : rows <= 4 ? 4 : 2; }

}  // namespace
}  // namespace pk

#include "vnni.inc"

namespace pk {

const ProductS8 neon_s8 = {"neon", kTileRows, TileCode::kSigned8, multiply};

}  // namespace pk
