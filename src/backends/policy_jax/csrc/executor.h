/* XLA's thread pool as an executor of the kernels. */
#ifndef POLICY_JAX_EXECUTOR_H_
#define POLICY_JAX_EXECUTOR_H_

#include <stdlib.h>

#include "plain_rounding.h"
#include "policy_kernels.h"
#include "xla_ffi.h"

inline void destroy(const xla_ffi::Api* api, xla_ffi::Error* error) {
  xla_ffi::Error_Destroy_Args args = {sizeof(args), nullptr, error};
  api->Error_Destroy(&args);
}

class XlaExecutor {
 public:
  explicit XlaExecutor(const xla_ffi::CallFrame* frame) : frame_(frame) {
    int64_t threads = 0;
    xla_ffi::ThreadPool_NumThreads_Args args = {sizeof(args), nullptr, frame->ctx, &threads};
    if (xla_ffi::Error* error = frame->api->ThreadPool_NumThreads(&args)) {
      destroy(frame->api, error);
      threads = 0;
    }
    executor_ = {static_cast<int32_t>(threads), submit, this};
  }

  /* NULL, for the kernels' own threads, where XLA gives no pool. */
  const pk_executor* get() const { return executor_.threads > 0 ? &executor_ : nullptr; }

 private:
  struct Task {
    void (*run)(void*);
    void* argument;
  };

  static void submit(void* context, void (*task)(void*), void* argument) {
    const XlaExecutor* self = static_cast<const XlaExecutor*>(context);
    Task* made = static_cast<Task*>(malloc(sizeof(Task)));
    if (made == nullptr) {
      task(argument);
      return;
    }
    *made = {task, argument};
    const xla_ffi::Api* api = self->frame_->api;
    xla_ffi::ThreadPool_Schedule_Args args = {sizeof(args), nullptr, self->frame_->ctx, run, made};
    if (xla_ffi::Error* error = api->ThreadPool_Schedule(&args)) {
      destroy(api, error);
      run(made);
    }
  }

  static void run(void* data) {
    const PlainRounding rounding;
    const Task task = *static_cast<Task*>(data);
    free(data);
    task.run(task.argument);
  }

  const xla_ffi::CallFrame* frame_;
  pk_executor executor_;
};

#endif  // POLICY_JAX_EXECUTOR_H_
