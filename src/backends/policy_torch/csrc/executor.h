/* torch's threads as an executor of the kernels. */
#ifndef POLICY_TORCH_EXECUTOR_H_
#define POLICY_TORCH_EXECUTOR_H_

#include "policy_kernels.h"
#include "torch_shim.h"

/* True in the child of a fork. torch's own pool has no threads there, and waits for them. */
extern bool forked;

/* True where someone asked the kernels for another number of threads than their default: it goes
 * before torch's. */
bool threads_were_asked_for();

class TorchExecutor {
 public:
  TorchExecutor() {
    uint32_t threads = 1;
    if (shim::torch.torch_get_num_threads(&threads) != 0 || threads == 0) threads = 1;
    executor_ = {static_cast<int32_t>(threads), nullptr, nullptr, run};
  }

  /* NULL for the kernels' own threads. */
  const pk_executor* get() const {
    if (threads_were_asked_for() || (forked && executor_.threads > 1)) return nullptr;
    return &executor_;
  }

  /* Runs function(begin, end, context) on parts of [0, count), each of `grain` at least. */
  void parallel_for(int64_t count, int64_t grain, shim::Range function, void* context) const {
    if (get() == nullptr || executor_.threads == 1 || count <= grain ||
        shim::torch.torch_parallel_for(0, count, grain, function, context) != 0) {
      function(0, count, context);
    }
  }

 private:
  struct Task {
    void (*run)(void*);
    void* argument;
  };

  static void run_task(int64_t, int64_t, void* data) {
    const Task* task = static_cast<const Task*>(data);
    task->run(task->argument);
  }

  static void run(void*, int32_t threads, void (*task)(void*), void* argument) {
    Task made = {task, argument};
    /* Where it fails, the product's own thread does all the work. */
    shim::torch.torch_parallel_for(0, threads, 1, run_task, &made);
  }

  pk_executor executor_;
};

#endif  // POLICY_TORCH_EXECUTOR_H_
