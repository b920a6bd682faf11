/* The part of XLA's FFI C interface, version 0.1 and later, that the handlers use.
 *
 * Written out here so that no header of jaxlib is needed to build. XLA only ever appends to these
 * structs, and every struct carries its size; tests/backends/test_jax_ffi.py compares sizes and
 * offsets with the header of the jaxlib that is installed. The names are XLA's own, without
 * XLA_FFI_.
 */
#ifndef POLICY_JAX_XLA_FFI_H_
#define POLICY_JAX_XLA_FFI_H_

#include <stddef.h>
#include <stdint.h>

namespace xla_ffi {

enum { kExtensionMetadata = 1, kStageExecute = 3, kAttrScalar = 3 };
enum { kInvalidArgument = 3, kInternal = 13 };
enum { kS8 = 2, kU8 = 6, kS64 = 5, kF16 = 10, kF32 = 11, kBF16 = 16, kF8E5M2 = 19, kF8E4M3FN = 20 };
/* What the handlers are written for; XLA refuses a handler of another major version. */
enum { kApiMajor = 0, kApiMinor = 1 };

struct Extension_Base {
  size_t struct_size;
  int type;
  Extension_Base* next;
};

struct Api_Version {
  size_t struct_size;
  Extension_Base* extension_start;
  int major_version;
  int minor_version;
};

struct Metadata {
  size_t struct_size;
  Api_Version api_version;
  uint32_t traits;
};

struct Metadata_Extension {
  Extension_Base extension_base;
  Metadata* metadata;
};

struct Error;

struct Error_Create_Args {
  size_t struct_size;
  Extension_Base* extension_start;
  const char* message;
  int errc;
};

struct Error_Destroy_Args {
  size_t struct_size;
  Extension_Base* extension_start;
  Error* error;
};

struct Buffer {
  size_t struct_size;
  Extension_Base* extension_start;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct ByteSpan {
  const char* ptr;
  size_t len;
};

struct Scalar {
  int dtype;
  void* value;
};

struct Args {
  size_t struct_size;
  Extension_Base* extension_start;
  int64_t size;
  int* types;
  void** args;
};

struct Rets {
  size_t struct_size;
  Extension_Base* extension_start;
  int64_t size;
  int* types;
  void** rets;
};

struct Attrs {
  size_t struct_size;
  Extension_Base* extension_start;
  int64_t size;
  int* types;
  ByteSpan** names;
  void** attrs;
};

struct ExecutionContext;

struct ThreadPool_Schedule_Args {
  size_t struct_size;
  Extension_Base* extension_start;
  ExecutionContext* ctx;
  void (*task)(void* data);
  void* data;
};

struct ThreadPool_NumThreads_Args {
  size_t struct_size;
  Extension_Base* extension_start;
  ExecutionContext* ctx;
  int64_t* num_threads;
};

/* Up to the last function that the handlers call. */
struct Api {
  size_t struct_size;
  Extension_Base* extension_start;
  Api_Version api_version;
  const void* internal_api;
  Error* (*Error_Create)(Error_Create_Args*);
  void* Error_GetMessage;
  void (*Error_Destroy)(Error_Destroy_Args*);
  void* others[8]; /* Handler_Register to DeviceMemory_Free */
  Error* (*ThreadPool_Schedule)(ThreadPool_Schedule_Args*);
  Error* (*ThreadPool_NumThreads)(ThreadPool_NumThreads_Args*);
};

struct CallFrame {
  size_t struct_size;
  Extension_Base* extension_start;
  const Api* api;
  ExecutionContext* ctx;
  int stage;
  Args args;
  Rets rets;
  Attrs attrs;
};

}  // namespace xla_ffi

#endif  // POLICY_JAX_XLA_FFI_H_
