// float32 on NEON: a vector is one channel by 4 k. Up to 4 rows take 4 vectors in a pass, 16 sums
// in 32 registers. The float8 formats go through float16, as in avx2/float32.cc.
#include <arm_neon.h>

#include "neon/neon.h"

namespace pk {
namespace {

struct Vector {
  using Type = float32x4_t;
  static constexpr int kLanes = 4;
  static Type zero() { return vdupq_n_f32(0.0f); }
  static Type load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, Type values) { vst1q_f32(to, values); }
  static Type add(Type a, Type b) { return vaddq_f32(a, b); }
  static Type repeat4(const float* from) { return vld1q_f32(from); }
  static Type multiply_add(Type sums, Type x, Type w) { return vfmaq_f32(sums, x, w); }
};

constexpr int kTileRows = 4;
constexpr int kGroup = 4;
constexpr int vectors(int rows) { return rows <= 2 ? 8 : 4; }

// Four vectors from the halves' bits of 16 values, in the order of the codes.
inline void widen(uint16x8_t low, uint16x8_t high, float32x4_t* w) {
  const float16x8_t first = vreinterpretq_f16_u16(low), second = vreinterpretq_f16_u16(high);
  w[0] = vcvt_f32_f16(vget_low_f16(first));
  w[1] = vcvt_high_f32_f16(first);
  w[2] = vcvt_f32_f16(vget_low_f16(second));
  w[3] = vcvt_high_f32_f16(second);
}

inline uint8x16_t load16(const int8_t* from) { return vreinterpretq_u8_s8(vld1q_s8(from)); }

struct DecodeS8 {
  static void decode(const int8_t* from, float32x4_t* w) {
    const int8x16_t codes = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    w[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    w[1] = vcvtq_f32_s32(vmovl_high_s16(low));
    w[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    w[3] = vcvtq_f32_s32(vmovl_high_s16(high));
  }
  static constexpr int channel(int v, int) { return v; }
};

struct DecodeE5M2 {
  static void decode(const int8_t* from, float32x4_t* w) {
    const uint8x16_t codes = load16(from);
    widen(vshll_n_u8(vget_low_u8(codes), 8), vshll_high_n_u8(codes, 8), w);
  }
  static constexpr int channel(int v, int) { return v; }
};

struct DecodeE4M3FN {
  static uint16x8_t half(uint8x8_t codes) {
    const uint16x8_t magnitude = vmovl_u8(vand_u8(codes, vdup_n_u8(0x7f)));
    const uint16x8_t sign = vshll_n_u8(vand_u8(codes, vdup_n_u8(0x80)), 8);
    const uint16x8_t nan = vceqq_u16(magnitude, vdupq_n_u16(0x7f));
    const uint16x8_t bits = vorrq_u16(sign, vshlq_n_u16(magnitude, 7));
    return vorrq_u16(bits, vandq_u16(nan, vdupq_n_u16(0x7e00)));
  }
  static void decode(const int8_t* from, float32x4_t* w) {
    const uint8x16_t codes = load16(from);
    widen(half(vget_low_u8(codes)), half(vget_high_u8(codes)), w);
    for (int v = 0; v < kGroup; ++v) w[v] = vmulq_n_f32(w[v], 256.0f);
  }
  static constexpr int channel(int v, int) { return v; }
};

}  // namespace
}  // namespace pk

#include "float32.inc"

namespace pk {

const ProductFloat neon_float32 = {"neon", kTileRows, multiply};

}  // namespace pk
