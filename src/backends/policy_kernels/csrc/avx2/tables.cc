// Compiled without instruction set flags: the dispatcher reads these on any CPU.
#include "avx2/avx2.h"

namespace pk {

const KernelTable avx2_kernels = {"avx2", &avx2_rows, &avx2_s8, &avx2_float32, nullptr, 0, nullptr};
const KernelTable avxvnni_kernels = {"avxvnni", &avx2_rows, &avxvnni_s8, &avx2_float32,
                                     nullptr,   0,          nullptr};

}  // namespace pk
