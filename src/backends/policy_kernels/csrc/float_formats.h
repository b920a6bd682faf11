// Conversions between float32 and the smaller formats, one value at a time and without branches,
// so that loops over them vectorize.
//
// Everything here is in an anonymous namespace: a file compiled for one instruction set must never
// lend its copy of an inline function to a file compiled for another.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "policy_kernels.h"

#if FLT_EVAL_METHOD != 0
#error "float32 results must be rounded after each operation; build with -msse2 -mfpmath=sse"
#endif

namespace pk {
namespace {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kQuietNanBits = 0x7fc00000u;

// The smallest amax a scale is made from: no scale is then 0, subnormal or infinite.
constexpr float kAmaxFloor = 0x1p-100f;

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Bit layouts: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5.
struct E4M3FN {
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint8_t kNan = 0x7f;
  static constexpr bool is_nan(unsigned magnitude) { return magnitude == 0x7f; }
  static constexpr bool is_infinity(unsigned) { return false; }
};

struct E5M2 {
  static constexpr int kMantissa = 2;
  static constexpr int kBias = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr uint8_t kNan = 0x7e;
  static constexpr bool is_nan(unsigned magnitude) { return magnitude > 0x7c; }
  static constexpr bool is_infinity(unsigned magnitude) { return magnitude == 0x7c; }
};

// The code of x / scale, clamped and rounded to nearest even.
template <class Format>
inline uint8_t encode(float x, float scale) {
  constexpr int kDropped = 23 - Format::kMantissa;
  constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(127 + 1 - Format::kBias) << 23;
  // A float32 whose unit in the last place is the format's subnormal step: adding it makes the
  // hardware round a small value to that step, half to even, and leaves the code in the low bits.
  constexpr uint32_t kStepBits = static_cast<uint32_t>(127 + 1 - Format::kBias + kDropped) << 23;

  const float quotient = x / scale;
  const uint32_t bits = to_bits(quotient);
  const uint32_t sign = (bits & kSignBit) >> 24;
  const uint32_t magnitude = bits & ~kSignBit;
  const uint32_t max_bits = to_bits(Format::kMax);
  const uint32_t clamped = magnitude < max_bits ? magnitude : max_bits;

  const uint32_t half = (1u << (kDropped - 1)) - 1 + ((clamped >> kDropped) & 1u);
  const uint32_t normal = (clamped - kMinNormalBits + (1u << 23) + half) >> kDropped;
  const uint32_t subnormal = to_bits(from_bits(clamped) + from_bits(kStepBits)) - kStepBits;
  const uint32_t finite = clamped < kMinNormalBits ? subnormal : normal;

  // The sign of a NaN quotient is the processor's choice unless it comes from x.
  const uint32_t x_bits = to_bits(x);
  const uint32_t nan_sign = (x_bits & ~kSignBit) > kInfinityBits ? (x_bits & kSignBit) >> 24 : 0u;
  const uint32_t nan = nan_sign | Format::kNan;
  return static_cast<uint8_t>(magnitude > kInfinityBits ? nan : (sign | finite));
}

// The float32 bits of a code. Every value of both formats is a normal float32, 0, infinity or NaN.
template <class Format>
constexpr uint32_t decoded_bits(unsigned code) {
  const unsigned magnitude = code & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  if (Format::is_nan(magnitude)) return sign | kQuietNanBits;
  if (Format::is_infinity(magnitude)) return sign | kInfinityBits;
  int exponent = static_cast<int>(magnitude >> Format::kMantissa);
  uint32_t mantissa = magnitude & ((1u << Format::kMantissa) - 1u);
  if (exponent == 0) {
    if (mantissa == 0) return sign;
    exponent = 1;
    while ((mantissa >> Format::kMantissa) == 0) {
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= (1u << Format::kMantissa) - 1u;
  }
  return sign | static_cast<uint32_t>(exponent + 127 - Format::kBias) << 23 |
         mantissa << (23 - Format::kMantissa);
}

// The float32 value of a float16; exact.
inline float float16_value(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = normal + (magnitude >= 0x7c00u ? 112u << 23 : 0u);
  const uint32_t subnormal =
      to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return from_bits(sign | (magnitude < 0x0400u ? subnormal : special));
}

// The nearest float16, half to even; too large values give infinities.
inline uint16_t float16_bits(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t sign = (bits & kSignBit) >> 16;
  const uint32_t magnitude = bits & ~kSignBit;
  const uint32_t rounding = 0xfffu + ((magnitude >> 13) & 1u);
  const uint32_t normal = (magnitude - (112u << 23) + rounding) >> 13;
  // At 0.5 the unit in the last place of a float32 is float16's subnormal step.
  const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t limited = magnitude >= 0x47800000u ? 0x7c00u : finite;
  return static_cast<uint16_t>(sign | (magnitude > kInfinityBits ? 0x7e00u : limited));
}

inline float bfloat16_value(uint16_t half) { return from_bits(static_cast<uint32_t>(half) << 16); }

// The nearest bfloat16, half to even.
inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & ~kSignBit) > kInfinityBits ? nan : rounded);
}

}  // namespace
}  // namespace pk
