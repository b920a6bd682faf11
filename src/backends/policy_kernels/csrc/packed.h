// The packed form of a weight [n][k] of one-byte codes.
//
// At the first address that is a multiple of 64, [padded n / 32] panels, each of:
//   header   64 bytes, says what the panel is
//   excess   uint32 [parts][32 n]: 128 * the sum of the codes of each part of kSumLength, for
//            products that add 128 to the codes of x; 0 for float8
//   blocks   [padded k / 64][2][16 k4][16 n][4 k], padding is 0
// So panels in a row are a packed weight too, whatever lies around them.
#pragma once

#include <cstring>

#include "kernels.h"

namespace pk {

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct PackedHeader {
  char magic[8];
  int64_t n, k;
  pk_format code;
  char zeros[4];
  int64_t channel;  // the panel's first, of n
  char more_zeros[24];
};
static_assert(sizeof(PackedHeader) == 64, "panels must start at a multiple of 64");

constexpr char kPackedMagic[8] = {'p', 'k', 'p', 'a', 'c', 'k', '0', '2'};

// A view of n channels of a packed weight, at least 1; reads the first panel's header only.
class Packed {
 public:
  Packed(const void* data, int64_t n)
      : start_(reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(data) + 63) / 64 * 64)),
        n_(n) {
    std::memcpy(&header_, start_, sizeof header_);
  }

  bool valid() const { return std::memcmp(header_.magic, kPackedMagic, sizeof kPackedMagic) == 0; }
  // All that is left of the weight, or some whole panels of it.
  bool has_n() const {
    const int64_t left = header_.n - header_.channel;
    return n_ == left || (n_ < left && n_ % kPanel == 0);
  }
  int64_t n() const { return n_; }
  int64_t packed_n() const { return header_.n; }
  int64_t k() const { return header_.k; }
  pk_format code() const { return header_.code; }

  int64_t panels() const { return divided_up(n(), kPanel); }
  int64_t blocks() const { return divided_up(k(), kBlock); }
  int64_t parts() const { return divided_up(k(), kSumLength); }

  // The excess of one part of one panel, [32].
  const uint32_t* excess(int64_t part, int64_t panel) const {
    return reinterpret_cast<const uint32_t*>(header(panel) + sizeof(PackedHeader)) + part * kPanel;
  }

  // The panel's blocks.
  const int8_t* panel(int64_t index) const {
    return reinterpret_cast<const int8_t*>(excess(parts(), index));
  }

  const char* header(int64_t panel) const {
    const int64_t excess_bytes = parts() * kPanel * static_cast<int64_t>(sizeof(uint32_t));
    return start_ + panel * (static_cast<int64_t>(sizeof(PackedHeader)) + excess_bytes +
                             blocks() * kPanelBlockBytes);
  }

 private:
  const char* start_;
  int64_t n_;
  PackedHeader header_;
};

}  // namespace pk
