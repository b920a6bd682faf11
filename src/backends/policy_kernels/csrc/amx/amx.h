// The kernels on AMX tiles and their table.
#pragma once

#include "kernels.h"

namespace pk {

extern const ProductS8 amx_s8;
extern const ProductBfloat16 amx_bfloat16;

extern const KernelTable amx_kernels;

}  // namespace pk
