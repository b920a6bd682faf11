// The scalar kernels: plain loops that run on every CPU, and the reference for all other ISAs.
#pragma once

#include <cstdlib>

#include "kernels.h"

namespace pk {
namespace scalar {

QuantizeRowsS8 quantize_rows_s8;
EncodeF8 encode_f8;
QuantizeRowsF8 quantize_rows_f8;
DecodeF8 decode_f8;
LinearS8 linear_s8;
LinearS8Codes linear_s8_codes;
LinearS8W linear_s8w;
LinearF8 linear_f8;
LinearF8W linear_f8w;

}  // namespace scalar

namespace {

// Heap memory for `rows * columns` elements, freed with the object; `data` is null on failure.
template <class T>
struct Scratch {
  T* data;

  Scratch(int64_t rows, int64_t columns) : data(nullptr) {
    int64_t bytes;
    if (__builtin_mul_overflow(rows, columns, &bytes)) return;
    if (__builtin_mul_overflow(bytes, static_cast<int64_t>(sizeof(T)), &bytes)) return;
    // malloc(0) may return null, which would read as a failure.
    data = static_cast<T*>(std::malloc(bytes > 0 ? static_cast<size_t>(bytes) : 1));
  }
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Sum of a[i] * b[i]. Eight partial sums let the compiler use vector registers without leave to
// reorder additions; double keeps the whole sum far below one float32 rounding.
template <class A, class B>
inline double dot_in_double(int64_t k, const A* a, const B* b) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
    }
  }
  double sum = 0.0;
  for (; i < k; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// acc * scale + bias, each operation rounded to float32 (this needs -ffp-contract=off).
inline float scaled(float acc, float scale, const float* bias, int64_t channel) {
  const float product = acc * scale;
  return bias == nullptr ? product : product + bias[channel];
}

}  // namespace
}  // namespace pk
