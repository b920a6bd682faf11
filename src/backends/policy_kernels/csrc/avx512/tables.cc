// Compiled without instruction set flags: the dispatcher reads these on any CPU.
#include "avx512/avx512.h"

namespace pk {

const KernelTable avx512vnni_kernels = {
    "avx512vnni", &avx512_rows, &avx512vnni_s8, &avx512_float32, nullptr, 0, nullptr};
const KernelTable avx512bf16_kernels = {
    "avx512bf16", &avx512_rows, &avx512vnni_s8, &avx512vbmi_float32, &avx512bf16_bfloat16, 0,
    nullptr};

}  // namespace pk
