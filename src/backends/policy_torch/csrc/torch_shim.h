/* The part of torch's stable C interface that the operators use, declared anew so that nothing of
 * torch is needed to build. tests/backends/test_torch_stable.py compares it with torch's headers.
 *
 * Every function gives 0, or an error code after which its outputs hold nothing, unless it says
 * otherwise. The interface is that of torch 2.10, which keeps it for two years at least.
 */
#ifndef POLICY_TORCH_SHIM_H_
#define POLICY_TORCH_SHIM_H_

#include <stddef.h>
#include <stdint.h>

/* torch's names, so that the types are the same ones where both headers are read. */
struct AtenTensorOpaque;
class TorchLibraryOpaque;

namespace shim {

using Tensor = AtenTensorOpaque*;
using Library = TorchLibraryOpaque*;
using Error = int32_t;
/* An argument or result of an operator: a tensor's handle, an integer, a dtype, or for a `Tensor?`
 * NULL or a pointer to a Value in memory that the receiver frees. */
using Value = uint64_t;
/* An operator's implementation. It owns its arguments, and puts its results in their place. */
using Boxed = void (*)(Value* stack, uint64_t arguments, uint64_t results);
using Range = void (*)(int64_t begin, int64_t end, void* context);

constexpr uint64_t kVersion = 2ull << 56 | 10ull << 48; /* the interface's */

/* X(result, name, arguments) for each function. */
#define POLICY_TORCH_SHIM(X)                                                                      \
  X(Error, aoti_torch_library_init_impl,                                                          \
    (const char* space, const char* key, const char* file, uint32_t line, Library* out))          \
  X(Error, torch_library_impl,                                                                    \
    (Library library, const char* name, Boxed function, uint64_t version))                        \
  X(Error, aoti_torch_get_dim, (Tensor tensor, int64_t* out))                                     \
  X(Error, aoti_torch_get_sizes, (Tensor tensor, int64_t** out))                                  \
  X(Error, aoti_torch_get_strides, (Tensor tensor, int64_t** out))                                \
  X(Error, aoti_torch_get_dtype, (Tensor tensor, int32_t* out))                                   \
  X(Error, torch_get_const_data_ptr, (Tensor tensor, const void** out))                           \
  X(Error, torch_get_mutable_data_ptr, (Tensor tensor, void** out))                               \
  X(Error, aoti_torch_empty_strided,                                                              \
    (int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device,    \
     int32_t device_index, Tensor* out))                                                          \
  X(Error, aoti_torch_copy_, (Tensor self, Tensor source, int32_t non_blocking))                  \
  X(Error, aoti_torch_delete_tensor_object, (Tensor tensor))                                      \
  X(Error, torch_parallel_for,                                                                    \
    (int64_t begin, int64_t end, int64_t grain, Range function, void* context))                   \
  X(Error, torch_get_num_threads, (uint32_t* out))                                                \
  /* Throws an exception of C++ where condition is false. */                                      \
  X(void, aoti_torch_check,                                                                       \
    (bool condition, const char* function, const char* file, uint32_t line, const char* message)) \
  X(int32_t, aoti_torch_device_type_cpu, (void))                                                  \
  X(int32_t, aoti_torch_dtype_float32, (void))                                                    \
  X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                   \
  X(int32_t, aoti_torch_dtype_float16, (void))                                                    \
  X(int32_t, aoti_torch_dtype_float8_e4m3fn, (void))                                              \
  X(int32_t, aoti_torch_dtype_float8_e5m2, (void))                                                \
  X(int32_t, aoti_torch_dtype_int8, (void))                                                       \
  X(int32_t, aoti_torch_dtype_uint8, (void))                                                      \
  X(int32_t, aoti_torch_dtype_int64, (void))

struct Functions {
#define POLICY_TORCH_DECLARE(result, name, arguments) result(*name) arguments;
  POLICY_TORCH_SHIM(POLICY_TORCH_DECLARE)
#undef POLICY_TORCH_DECLARE
  /* Frees the memory of a Value. From torch 2.13 on; before, what C++'s delete calls. */
  Error (*torch_delete_stable_ivalue)(Value* value);
  void (*operator_delete)(void* memory);
};

extern Functions torch;

/* Finds the functions in the torch that is loaded already. NULL, or the name of what is missing. */
const char* find_functions();

}  // namespace shim

#endif  // POLICY_TORCH_SHIM_H_
