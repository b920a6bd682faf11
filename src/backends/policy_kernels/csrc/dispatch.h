// Which kernels run: those of the instruction set chosen for the process.
#pragma once

#include "kernels.h"

namespace pk {

// The chosen table; never null.
const KernelTable& kernels();

}  // namespace pk
