// The kernels for 256 bit vectors and their tables.
#pragma once

#include "kernels.h"

namespace pk {

extern const RowKernels avx2_rows;  // AVX2, FMA, F16C, as all that follow
extern const ProductS8 avx2_s8;
extern const ProductS8 avxvnni_s8;  // and AVX-VNNI
extern const ProductFloat avx2_float32;

extern const KernelTable avx2_kernels;
extern const KernelTable avxvnni_kernels;

}  // namespace pk
