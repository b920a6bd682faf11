#pragma once

#include <cstddef>

namespace pk {

// `bytes` of memory at a multiple of 64 that belong to the calling thread until its next call, and
// are freed when it ends; null when there is no memory. Asking again for as much allocates nothing.
void* thread_scratch(size_t bytes);

}  // namespace pk
