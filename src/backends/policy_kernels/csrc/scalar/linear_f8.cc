// float8 products. A row of weights is decoded once per block of rows of x.
#include "scalar/scalar.h"

namespace pk {
namespace scalar {

pk_status linear_f8(int64_t m, int64_t n, int64_t k, pk_format x_format, const uint8_t* x,
                    int64_t ldx, const float* x_scale, int64_t x_scale_stride, pk_format w_format,
                    const uint8_t* w, int64_t ldw, const float* w_scale, int64_t w_scale_stride,
                    const float* bias, float* y, int64_t ldy) {
  Scratch<float> values(smaller(m, kRowBlock), k);
  Scratch<float> weights(1, k);
  if (values.data == nullptr || weights.data == nullptr) return PK_ERR_MEMORY;
  for (int64_t first = 0; first < m; first += kRowBlock) {
    const int64_t rows = smaller(m - first, kRowBlock);
    for (int64_t row = 0; row < rows; ++row) {
      decode_f8(x_format, k, x + (first + row) * ldx, values.data + row * k);
    }
    for (int64_t channel = 0; channel < n; ++channel) {
      decode_f8(w_format, k, w + channel * ldw, weights.data);
      for (int64_t row = 0; row < rows; ++row) {
        const double acc = dot_in_double(k, values.data + row * k, weights.data);
        const float scale =
            x_scale[(first + row) * x_scale_stride] * w_scale[channel * w_scale_stride];
        y[(first + row) * ldy + channel] = scaled(static_cast<float>(acc), scale, bias, channel);
      }
    }
  }
  return PK_OK;
}

pk_status linear_f8w(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                     pk_format w_format, const uint8_t* w, int64_t ldw, const float* w_scale,
                     int64_t w_scale_stride, const float* bias, float* y, int64_t ldy) {
  Scratch<float> weights(1, k);
  if (weights.data == nullptr) return PK_ERR_MEMORY;
  for (int64_t first = 0; first < m; first += kRowBlock) {
    const int64_t end = first + smaller(m - first, kRowBlock);
    for (int64_t channel = 0; channel < n; ++channel) {
      decode_f8(w_format, k, w + channel * ldw, weights.data);
      for (int64_t row = first; row < end; ++row) {
        const double acc = dot_in_double(k, x + row * ldx, weights.data);
        y[row * ldy + channel] =
            scaled(static_cast<float>(acc), w_scale[channel * w_scale_stride], bias, channel);
      }
    }
  }
  return PK_OK;
}

}  // namespace scalar
}  // namespace pk
