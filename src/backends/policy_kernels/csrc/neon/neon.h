// The kernels for 64 bit Arm with the dot product instructions, and their table.
#pragma once

#include "kernels.h"

namespace pk {

extern const RowKernels neon_rows;
extern const ProductS8 neon_s8;
extern const ProductFloat neon_float32;

extern const KernelTable neon_kernels;

}  // namespace pk
