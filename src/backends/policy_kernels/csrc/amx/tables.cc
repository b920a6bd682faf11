// Compiled without instruction set flags: the dispatcher reads this on any CPU.
#include "amx/amx.h"
#include "avx512/avx512.h"

namespace pk {

const KernelTable amx_kernels = {"amx", &avx512_rows, &amx_s8, &avx512vbmi_float32, &amx_bfloat16};

}  // namespace pk
