/* Gives torch the operators. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "kernel_functions.h"
#include "operators.h"

Kernels kernels;
bool forked = false;

namespace {

int64_t unasked_threads;

void after_fork_in_child() { forked = true; }

template <void (*Operator)(Call&)>
void boxed(shim::Value* stack, uint64_t, uint64_t results) {
  Call call(stack);
  Operator(call);
  call.end(static_cast<int>(results));
  /* Throws past this frame, which has nothing left to free. */
  if (call.failed()) shim::torch.aoti_torch_check(false, "", "policy_torch", 0, call.message());
}

struct Named {
  const char* name;
  shim::Boxed function;
};

constexpr Named kOperators[] = {
    {"linear_s8", boxed<linear_s8>},
    {"linear_s8w", boxed<linear_s8w>},
    {"linear_f8", boxed<linear_f8>},
    {"linear_f8w", boxed<linear_f8w>},
    {"packed_linear_s8", boxed<packed_linear_s8>},
    {"packed_linear_s8w", boxed<packed_linear_s8w>},
    {"packed_linear_f8", boxed<packed_linear_f8>},
    {"packed_linear_f8w", boxed<packed_linear_f8w>},
    {"unpack", boxed<unpack>},
    {"packed_rows", boxed<packed_rows>},
    {"encode_f8", boxed<encode_f8>},
    {"scale_f8", boxed<scale_f8>},
    {"quantize_rows_f8", boxed<quantize_rows_f8>},
};

void read_dtypes() {
  dtypes.float32 = shim::torch.aoti_torch_dtype_float32();
  dtypes.bfloat16 = shim::torch.aoti_torch_dtype_bfloat16();
  dtypes.float16 = shim::torch.aoti_torch_dtype_float16();
  dtypes.float8_e4m3fn = shim::torch.aoti_torch_dtype_float8_e4m3fn();
  dtypes.float8_e5m2 = shim::torch.aoti_torch_dtype_float8_e5m2();
  dtypes.int8 = shim::torch.aoti_torch_dtype_int8();
  dtypes.uint8 = shim::torch.aoti_torch_dtype_uint8();
  dtypes.int64 = shim::torch.aoti_torch_dtype_int64();
}

}  // namespace

bool threads_were_asked_for() { return kernels.num_threads() != unasked_threads; }

extern "C" {

/* The version of the kernels' interface that this was compiled for. */
PK_API int32_t policy_torch_abi_version() { return PK_ABI_VERSION; }

/* Gives "", or the name of what the torch in this process lacks. */
PK_API const char* policy_torch_missing() {
  const char* name = shim::find_functions();
  return name == nullptr ? "" : name;
}

/* Registers the implementations on a CPU. policy_torch_missing must have given "".
 * functions: the kernels', in the order of Kernels
 * threads:   the number that the kernels have when nobody asks for one; 0 where somebody always
 * does Gives "", or the name of an operator that torch refused. */
PK_API const char* policy_torch_bind(void* const* functions, int64_t threads) {
  memcpy(&kernels, functions, sizeof(kernels));
  read_dtypes();
  unasked_threads = threads;
  pthread_atfork(nullptr, nullptr, after_fork_in_child);
  shim::Library library = nullptr; /* never freed: that would take the implementations away */
  if (shim::torch.aoti_torch_library_init_impl("policy_core_v1", "CPU", __FILE__, __LINE__,
                                               &library) != 0) {
    return "policy_core_v1";
  }
  for (const Named& one : kOperators) {
    if (shim::torch.torch_library_impl(library, one.name, one.function, shim::kVersion) != 0) {
      return one.name;
    }
  }
  return "";
}

}  // extern "C"
