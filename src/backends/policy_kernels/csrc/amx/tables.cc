// Compiled without instruction set flags: the dispatcher reads this on any CPU.
#include "amx/amx.h"
#include "avx512/avx512.h"

namespace pk {

// With up to 4 rows a product waits for its weights, and tiles of 16 rows would be nearly empty.
const KernelTable amx_kernels = {
    "amx", &avx512_rows, &amx_s8, &avx512vbmi_float32, &amx_bfloat16, 4, &avx512bf16_kernels};

}  // namespace pk
