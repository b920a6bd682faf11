// Work on several threads: the library's own pool, or an executor that the caller hands in.
#pragma once

#include "policy_kernels.h"

namespace pk {

// How many threads to use for work that one thread does in so many nanoseconds: 1 below the cost
// of waking another.
int64_t threads_for(const pk_executor* executor, int64_t nanoseconds);

// Runs body(context, i) for each i in [0, count), on up to `threads` threads with the caller among
// them, and returns when all are done. The indices are claimed one by one in rising order, and the
// caller claims too: it waits only for indices that are being worked on, so calls may be nested and
// no pool can deadlock. Without memory for its bookkeeping, the caller does all the work.
void parallel_for(const pk_executor* executor, int64_t threads, int64_t count,
                  void (*body)(void* context, int64_t index), void* context);

// One step of waiting for another thread: short at first, then leaving the processor to others.
void wait_a_little(int64_t round);

// The number of CPUs that the affinity and the cgroup quota leave this process; at least 1.
int64_t available_cpus();

}  // namespace pk
