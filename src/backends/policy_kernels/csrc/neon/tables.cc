// Compiled without instruction set flags: the dispatcher reads this on any CPU.
#include "neon/neon.h"

namespace pk {

const KernelTable neon_kernels = {"neon", &neon_rows, &neon_s8, &neon_float32, nullptr, 0, nullptr};

}  // namespace pk
