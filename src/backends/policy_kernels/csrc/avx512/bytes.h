// 64 codes to 64 bfloat16 values by table look-up: VPERMI2B picks one of 128 bytes by the low seven
// bits of a code. Two look-ups make the two bytes of each value; both formats are sign and
// magnitude, so the sign is the code's own upper bit. Every code is exact.
#pragma once

#include <immintrin.h>

#include "float_formats.h"

namespace pk {
namespace {

struct ByteTable {
  alignas(64) uint8_t bytes[128];
};

// The bytes at `shift` of the bfloat16 values of all non-negative codes.
template <class Format>
constexpr ByteTable byte_table(int shift) {
  ByteTable table{};
  for (unsigned code = 0; code < 128; ++code) {
    table.bytes[code] = static_cast<uint8_t>(decoded_bits<Format>(code) >> 16 >> shift);
  }
  return table;
}

template <class Format>
struct Tables {
  static constexpr ByteTable kLow = byte_table<Format>(0);
  static constexpr ByteTable kHigh = byte_table<Format>(8);
};

// The value of an int8 has all its bits in a bfloat16; code & 127 and the sign choose the entry.
constexpr uint32_t s8_bits(int value) {
  const unsigned magnitude = static_cast<unsigned>(value < 0 ? -value : value);
  if (magnitude == 0) return 0;
  int exponent = 0;
  while (magnitude >> (exponent + 1) != 0) ++exponent;
  const uint32_t mantissa = (magnitude << (23 - exponent)) & 0x7fffffu;
  return (value < 0 ? kSignBit : 0u) | static_cast<uint32_t>(127 + exponent) << 23 | mantissa;
}

constexpr ByteTable s8_table(bool negative, int shift) {
  ByteTable table{};
  for (int code = 0; code < 128; ++code) {
    table.bytes[code] = static_cast<uint8_t>(s8_bits(negative ? code - 128 : code) >> 16 >> shift);
  }
  return table;
}

struct TablesS8 {
  static constexpr ByteTable kLow[2] = {s8_table(false, 0), s8_table(true, 0)};
  static constexpr ByteTable kHigh[2] = {s8_table(false, 8), s8_table(true, 8)};
};

inline __m512i look_up(const ByteTable& table, __m512i codes) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table.bytes), codes,
                                  _mm512_load_si512(table.bytes + 64));
}

struct Bytes {
  __m512i low, high;
};

template <class Format>
inline Bytes bytes_of_f8(__m512i codes) {
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i high = look_up(Tables<Format>::kHigh, codes);
  return {look_up(Tables<Format>::kLow, codes),
          _mm512_ternarylogic_epi32(high, codes, sign, 0xf8)};  // high | (codes & sign)
}

inline Bytes bytes_of_s8(__m512i codes) {
  const __mmask64 negative = _mm512_movepi8_mask(codes);
  return {_mm512_mask_blend_epi8(negative, look_up(TablesS8::kLow[0], codes),
                                 look_up(TablesS8::kLow[1], codes)),
          _mm512_mask_blend_epi8(negative, look_up(TablesS8::kHigh[0], codes),
                                 look_up(TablesS8::kHigh[1], codes))};
}

// The 64 values, in the order of the codes: in each quarter (16 bytes) of the register, `first` has
// the first eight codes and `second` the other eight.
struct Bfloat16s {
  __m512i first, second;
};

inline Bfloat16s interleave(Bytes bytes) {
  return {_mm512_unpacklo_epi8(bytes.low, bytes.high), _mm512_unpackhi_epi8(bytes.low, bytes.high)};
}

struct CodeS8 {
  static Bfloat16s decode(__m512i codes) { return interleave(bytes_of_s8(codes)); }
};
template <class Format>
struct CodeF8 {
  static Bfloat16s decode(__m512i codes) { return interleave(bytes_of_f8<Format>(codes)); }
};

}  // namespace
}  // namespace pk
