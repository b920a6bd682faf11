// The kernels for AVX-512 and their tables.
#pragma once

#include "kernels.h"

namespace pk {

extern const RowKernels avx512_rows;               // F, BW, DQ, VL
extern const ProductS8 avx512vnni_s8;              // and VNNI
extern const ProductFloat avx512_float32;          // F, BW, DQ, VL
extern const ProductFloat avx512vbmi_float32;      // and VBMI
extern const ProductBfloat16 avx512bf16_bfloat16;  // and VBMI, BF16

extern const KernelTable avx512vnni_kernels;
extern const KernelTable avx512bf16_kernels;

}  // namespace pk
