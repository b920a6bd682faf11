// int8 products. Weights stream once per block of rows; the rows' codes stay in cache.
#include "scalar/scalar.h"

namespace pk {
namespace {

// Exact for |code| <= 127 and k <= kSumLength. Unsigned, so that codes of -128 wrap as they do in
// vector registers instead of being undefined.
inline int32_t dot_codes(int64_t k, const int8_t* a, const int8_t* b) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    sum += static_cast<uint32_t>(static_cast<int32_t>(a[i]) * static_cast<int32_t>(b[i]));
  }
  return static_cast<int32_t>(sum);
}

inline float dot_in_parts(int64_t k, const int8_t* a, const int8_t* b) {
  float sum = static_cast<float>(dot_codes(smaller(k, kSumLength), a, b));
  for (int64_t start = kSumLength; start < k; start += kSumLength) {
    sum += static_cast<float>(dot_codes(smaller(k - start, kSumLength), a + start, b + start));
  }
  return sum;
}

void multiply_block(int64_t rows, int64_t n, int64_t k, const int8_t* x, int64_t ldx,
                    const float* x_scale, const int8_t* w, int64_t ldw, const float* w_scale,
                    const float* bias, float* y, int64_t ldy) {
  for (int64_t channel = 0; channel < n; ++channel) {
    const int8_t* weights = w + channel * ldw;
    for (int64_t row = 0; row < rows; ++row) {
      const float acc = dot_in_parts(k, x + row * ldx, weights);
      y[row * ldy + channel] = scaled(acc, x_scale[row] * w_scale[channel], bias, channel);
    }
  }
}

}  // namespace

namespace scalar {

pk_status linear_s8(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx, const int8_t* w,
                    int64_t ldw, const float* w_scale, const float* bias, float* y, int64_t ldy) {
  Scratch<int8_t> codes(smaller(m, kRowBlock), k);
  if (codes.data == nullptr) return PK_ERR_MEMORY;
  for (int64_t first = 0; first < m; first += kRowBlock) {
    const int64_t rows = smaller(m - first, kRowBlock);
    float x_scale[kRowBlock];
    quantize_rows_s8(rows, k, x + first * ldx, ldx, codes.data, k, x_scale);
    multiply_block(rows, n, k, codes.data, k, x_scale, w, ldw, w_scale, bias, y + first * ldy, ldy);
  }
  return PK_OK;
}

pk_status linear_s8_codes(int64_t m, int64_t n, int64_t k, const int8_t* x, int64_t ldx,
                          const float* x_scale, const int8_t* w, int64_t ldw, const float* w_scale,
                          const float* bias, float* y, int64_t ldy) {
  for (int64_t first = 0; first < m; first += kRowBlock) {
    multiply_block(smaller(m - first, kRowBlock), n, k, x + first * ldx, ldx, x_scale + first, w,
                   ldw, w_scale, bias, y + first * ldy, ldy);
  }
  return PK_OK;
}

pk_status linear_s8w(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx, const int8_t* w,
                     int64_t ldw, const float* w_scale, const float* bias, float* y, int64_t ldy) {
  for (int64_t first = 0; first < m; first += kRowBlock) {
    const int64_t end = first + smaller(m - first, kRowBlock);
    for (int64_t channel = 0; channel < n; ++channel) {
      for (int64_t row = first; row < end; ++row) {
        const double acc = dot_in_double(k, x + row * ldx, w + channel * ldw);
        y[row * ldy + channel] = scaled(static_cast<float>(acc), w_scale[channel], bias, channel);
      }
    }
  }
  return PK_OK;
}

}  // namespace scalar
}  // namespace pk
