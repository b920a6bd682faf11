// What the dispatcher knows of the kernels: one table of functions per instruction set.
//
// Kernels get arguments that api.cc has checked: sizes are positive where data is touched, strides
// are valid, and where k is 0 the strides along k are 0 too, so that no offset is added to NULL.
// A kernel's name is `<operation>_<isa>`.
#pragma once

#include "policy_kernels.h"

namespace pk {

// Longest run of code products of +-127 whose sum fits an int32: 127 * 127 * 131072 < 2^31.
constexpr int64_t kSumLength = 131072;

// Rows of x that share one pass over the weights.
constexpr int64_t kRowBlock = 8;

using QuantizeRowsS8 = void(int64_t m, int64_t k, const float* x, int64_t ldx, int8_t* codes,
                            int64_t ldq, float* scale);
using EncodeF8 = void(pk_format format, int64_t n, const float* x, float scale, uint8_t* codes);
using QuantizeRowsF8 = void(pk_format format, int64_t m, int64_t k, const float* x, int64_t ldx,
                            uint8_t* codes, int64_t ldq, float* scale);
using DecodeF8 = void(pk_format format, int64_t n, const uint8_t* codes, float* y);

// The products return PK_OK or PK_ERR_MEMORY.
using LinearS8 = pk_status(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                           const int8_t* w, int64_t ldw, const float* w_scale, const float* bias,
                           float* y, int64_t ldy);
using LinearS8Codes = pk_status(int64_t m, int64_t n, int64_t k, const int8_t* x, int64_t ldx,
                                const float* x_scale, const int8_t* w, int64_t ldw,
                                const float* w_scale, const float* bias, float* y, int64_t ldy);
using LinearS8W = LinearS8;
using LinearF8 = pk_status(int64_t m, int64_t n, int64_t k, pk_format x_format, const uint8_t* x,
                           int64_t ldx, const float* x_scale, int64_t x_scale_stride,
                           pk_format w_format, const uint8_t* w, int64_t ldw, const float* w_scale,
                           int64_t w_scale_stride, const float* bias, float* y, int64_t ldy);
using LinearF8W = pk_status(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                            pk_format w_format, const uint8_t* w, int64_t ldw, const float* w_scale,
                            int64_t w_scale_stride, const float* bias, float* y, int64_t ldy);

template <class Function>
struct Kernel {
  const char* name;
  Function* run;
};

struct KernelTable {
  const char* isa;
  Kernel<QuantizeRowsS8> quantize_rows_s8;
  Kernel<EncodeF8> encode_f8;
  Kernel<QuantizeRowsF8> quantize_rows_f8;
  Kernel<DecodeF8> decode_f8;
  Kernel<LinearS8> linear_s8;
  Kernel<LinearS8Codes> linear_s8_codes;
  Kernel<LinearS8W> linear_s8w;
  Kernel<LinearF8> linear_f8;
  Kernel<LinearF8W> linear_f8w;
};

extern const KernelTable scalar_kernels;

}  // namespace pk
