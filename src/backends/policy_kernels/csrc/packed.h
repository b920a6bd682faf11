// The packed form of a weight [n][k] of one-byte codes.
//
// At the first address that is a multiple of 64:
//   header   64 bytes, says what follows
//   excess   uint32 [parts][padded n]: 128 * the sum of the codes of each part of kSumLength, for
//            products that add 128 to the codes of x; only for int8
//   panels   [padded n / 32][padded k / 64][2][16 k4][16 n][4 k], padding is 0
#pragma once

#include <cstring>

#include "kernels.h"

namespace pk {

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct PackedHeader {
  char magic[8];
  int64_t n, k;
  pk_format code;
  char zeros[36];
};
static_assert(sizeof(PackedHeader) == 64, "panels must start at a multiple of 64");

constexpr char kPackedMagic[8] = {'p', 'k', 'p', 'a', 'c', 'k', '0', '1'};

// A view of a packed weight; reads the header only.
class Packed {
 public:
  explicit Packed(const void* data)
      : start_(reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(data) + 63) / 64 * 64)) {
    std::memcpy(&header_, start_, sizeof header_);
  }

  bool valid() const { return std::memcmp(header_.magic, kPackedMagic, sizeof kPackedMagic) == 0; }
  int64_t n() const { return header_.n; }
  int64_t k() const { return header_.k; }
  pk_format code() const { return header_.code; }

  int64_t panels() const { return divided_up(n(), kPanel); }
  int64_t blocks() const { return divided_up(k(), kBlock); }
  int64_t parts() const { return code() == PK_S8 ? divided_up(k(), kSumLength) : 0; }

  // The excess of one part of one panel, [32].
  const uint32_t* excess(int64_t part, int64_t panel) const {
    return reinterpret_cast<const uint32_t*>(start_ + sizeof(PackedHeader)) +
           (part * panels() + panel) * kPanel;
  }

  const int8_t* panel(int64_t index) const {
    return reinterpret_cast<const int8_t*>(excess(parts(), 0)) +
           index * blocks() * kPanelBlockBytes;
  }

 private:
  const char* start_;
  PackedHeader header_;
};

}  // namespace pk
