// The scalar products: plain loops over the packed layout that run on every CPU, and the reference
// for all other instruction sets.
#include "float_formats.h"
#include "kernels.h"

namespace pk {
namespace {

constexpr int64_t kHalf = kPanel / 2;

// Codes of one channel, [64], out of a block of a panel.
inline void gather_channel(const int8_t* block, int64_t channel, int8_t* codes) {
  const int8_t* from = block + channel / kHalf * (kPanelBlockBytes / 2) + channel % kHalf * 4;
  for (int64_t k = 0; k < kBlock; ++k) codes[k] = from[k / 4 * 64 + k % 4];
}

// Unsigned, so that sums wrap as they do in vector registers instead of being undefined.
void multiply_s8(int64_t rows, int64_t blocks, const void* tile, const int8_t* panel,
                 int32_t* sums) {
  const int8_t* x = static_cast<const int8_t*>(tile);
  uint32_t totals[8 * kPanel] = {};
  for (int64_t block = 0; block < blocks; ++block, panel += kPanelBlockBytes) {
    for (int64_t channel = 0; channel < kPanel; ++channel) {
      int8_t codes[kBlock];
      gather_channel(panel, channel, codes);
      for (int64_t row = 0; row < rows; ++row) {
        const int8_t* values = x + (block * rows + row) * kBlock;
        uint32_t sum = 0;
        for (int64_t k = 0; k < kBlock; ++k) {
          sum += static_cast<uint32_t>(static_cast<int32_t>(values[k]) * codes[k]);
        }
        totals[row * kPanel + channel] += sum;
      }
    }
  }
  for (int64_t i = 0; i < rows * kPanel; ++i) sums[i] = static_cast<int32_t>(totals[i]);
}

inline float decoded(pk_format code, int8_t bits) {
  if (code == PK_S8) return bits;
  const unsigned magnitude = static_cast<uint8_t>(bits);
  return from_bits(code == PK_F8_E4M3FN ? decoded_bits<E4M3FN>(magnitude)
                                        : decoded_bits<E5M2>(magnitude));
}

struct Values {
  float of[256];
};

Values values_of(pk_format code) {
  Values values;
  for (int bits = 0; bits < 256; ++bits) values.of[bits] = decoded(code, static_cast<int8_t>(bits));
  return values;
}

// Sums are kept in double: closer than any float32 sum can be.
void multiply_float32(pk_format code, int64_t rows, int64_t blocks, const void* tile,
                      const int8_t* panel, float* sums) {
  const float* x = static_cast<const float*>(tile);
  const Values values = values_of(code);
  double totals[8 * kPanel] = {};
  for (int64_t block = 0; block < blocks; ++block, panel += kPanelBlockBytes) {
    for (int64_t channel = 0; channel < kPanel; ++channel) {
      int8_t codes[kBlock];
      float weights[kBlock];
      gather_channel(panel, channel, codes);
      for (int64_t k = 0; k < kBlock; ++k) weights[k] = values.of[static_cast<uint8_t>(codes[k])];
      for (int64_t row = 0; row < rows; ++row) {
        const float* from = x + (block * rows + row) * kBlock;
        double lanes[8] = {};
        for (int64_t k = 0; k < kBlock; ++k) {
          lanes[k % 8] += static_cast<double>(from[k]) * static_cast<double>(weights[k]);
        }
        for (double lane : lanes) totals[row * kPanel + channel] += lane;
      }
    }
  }
  for (int64_t i = 0; i < rows * kPanel; ++i) sums[i] = static_cast<float>(totals[i]);
}

const ProductS8 product_s8 = {"scalar", 8, TileCode::kSigned8, multiply_s8};
const ProductFloat product_float32 = {"scalar", 8, multiply_float32};

}  // namespace

const KernelTable scalar_kernels = {"scalar", &scalar_rows, &product_s8, &product_float32, nullptr,
                                    0,        nullptr};

}  // namespace pk
