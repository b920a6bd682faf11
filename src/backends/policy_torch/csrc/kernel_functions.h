/* The kernels' functions, given by policy_torch_bind: the library that has them is loaded already.
 */
#ifndef POLICY_TORCH_KERNEL_FUNCTIONS_H_
#define POLICY_TORCH_KERNEL_FUNCTIONS_H_

#include "policy_kernels.h"

struct Kernels {
  decltype(&pk_last_error) last_error;
  decltype(&pk_num_threads) num_threads;
  decltype(&pk_packed_bytes) packed_bytes;
  decltype(&pk_pack_on) pack_on;
  decltype(&pk_unpack_on) unpack_on;
  decltype(&pk_linear_s8) linear_s8;
  decltype(&pk_linear_s8w) linear_s8w;
  decltype(&pk_linear_f8) linear_f8;
  decltype(&pk_linear_f8w) linear_f8w;
  decltype(&pk_dequantize_packed_rows) dequantize_packed_rows;
  decltype(&pk_encode_f8) encode_f8;
  decltype(&pk_quantize_rows_f8) quantize_rows_f8;
};

extern Kernels kernels;

#endif  // POLICY_TORCH_KERNEL_FUNCTIONS_H_
