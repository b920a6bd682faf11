// float32 on NEON: 16 codes are 4 channels by 4 k, a vector each. One row takes 16 vectors in a
// pass, 2 rows take 8, up to 6 take 4: at most 24 sums, 4 vectors of weights and one of x in 32
// registers. The float8 formats go through float16, as in avx2/float32.cc.
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

constexpr int kTileRows = 6;
constexpr int kGroup = 4;
constexpr int vectors(int rows) { return rows == 1 ? 16 : rows == 2 ? 8 : 4; }

struct DecodeS8 {
  static void decode(const int8_t* from, float32x4_t* w) {
    const int8x16_t codes = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes));
    const int16x8_t high = vmovl_high_s8(codes);
    w[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    w[1] = vcvtq_f32_s32(vmovl_high_s16(low));
    w[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    w[3] = vcvtq_f32_s32(vmovl_high_s16(high));
  }
  static constexpr int channel(int vector, int) { return vector; }
};

inline void from_float16(uint16x8_t low, uint16x8_t high, float32x4_t* w) {
  const float16x8_t first = vreinterpretq_f16_u16(low), second = vreinterpretq_f16_u16(high);
  w[0] = vcvt_f32_f16(vget_low_f16(first));
  w[1] = vcvt_high_f32_f16(first);
  w[2] = vcvt_f32_f16(vget_low_f16(second));
  w[3] = vcvt_high_f32_f16(second);
}

// e5m2 is the upper half of a float16.
struct DecodeE5M2 {
  static void decode(const int8_t* from, float32x4_t* w) {
    const uint8x16_t codes = vreinterpretq_u8_s8(vld1q_s8(from));
    from_float16(vshll_n_u8(vget_low_u8(codes), 8), vshll_high_n_u8(codes, 8), w);
  }
  static constexpr int channel(int vector, int) { return vector; }
};

// Shifted into a float16, e4m3fn's value is too small by the difference of the biases, 2^8; float16
// holds its subnormals too. The largest magnitude stands for NaN.
struct DecodeE4M3FN {
  static uint16x8_t float16_bits(int16x8_t wide) {  // the sign fills the upper byte
    const uint16x8_t bits = vreinterpretq_u16_s16(wide);
    const uint16x8_t magnitude = vandq_u16(bits, vdupq_n_u16(0x7f));
    const uint16x8_t sign = vandq_u16(bits, vdupq_n_u16(0x8000));
    const uint16x8_t nan = vceqq_u16(magnitude, vdupq_n_u16(0x7f));
    const uint16x8_t value = vorrq_u16(sign, vshlq_n_u16(magnitude, 7));
    return vorrq_u16(value, vandq_u16(nan, vdupq_n_u16(0x7e00)));
  }
  static void decode(const int8_t* from, float32x4_t* w) {
    const int8x16_t codes = vld1q_s8(from);
    from_float16(float16_bits(vmovl_s8(vget_low_s8(codes))), float16_bits(vmovl_high_s8(codes)), w);
    for (int v = 0; v < 4; ++v) w[v] = vmulq_n_f32(w[v], 256.0f);
  }
  static constexpr int channel(int vector, int) { return vector; }
};

}  // namespace
}  // namespace pk

#include "float32.inc"

namespace pk {

const ProductFloat neon_float32 = {"neon", kTileRows, multiply};

}  // namespace pk
