/* A weight as the kernels read it: packed, at an address that is a multiple of 64, for which all of
 * them were packed. */
#ifndef POLICY_TORCH_WEIGHT_H_
#define POLICY_TORCH_WEIGHT_H_

#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "kernel_functions.h"

/* Functions give NULL where the call has failed. */
class Weight {
 public:
  ~Weight() { free(owned_); }

  /* A weight of shape (n, k) that was packed before: itself where its address suits. */
  const void* packed(Call& call, const View& given, int64_t n, int64_t k) {
    const int64_t bytes = size(call, n, k);
    if (!call.failed() && (given.dtype != dtypes.uint8 || given.elements != bytes)) {
      call.fail("policy_torch: expected %lld packed bytes in uint8, got %lld elements",
                static_cast<long long>(bytes), static_cast<long long>(given.elements));
    }
    const View dense = call.dense(given, dtypes.uint8);
    if (call.failed()) return nullptr;
    if (reinterpret_cast<uintptr_t>(dense.data) % 64 == 0) return dense.data;
    if (allocate(call, bytes)) memcpy(owned_, dense.data, static_cast<size_t>(bytes));
    return owned_;
  }

  /* Codes of shape (n, k), packed here. */
  const void* pack(Call& call, const pk_executor* executor, const View& codes, pk_format code,
                   int64_t n, int64_t k) {
    const int64_t bytes = size(call, n, k);
    /* torch turns a matrix ten times faster than the kernels do. */
    const View dense = call.dense(codes, codes.dtype);
    if (call.failed() || !allocate(call, bytes)) return nullptr;
    call.check(kernels.pack_on(executor, code, n, k, dense.data, k > 0 ? k : 1, owned_));
    return owned_;
  }

 private:
  static int64_t size(Call& call, int64_t n, int64_t k) {
    int64_t bytes = 0;
    if (!call.failed()) call.check(kernels.packed_bytes(n, k, &bytes));
    return bytes;
  }

  bool allocate(Call& call, int64_t bytes) {
    if (posix_memalign(&owned_, 64, static_cast<size_t>(bytes)) == 0) return true;
    owned_ = nullptr;
    call.fail("policy_torch: there is no memory for a packed weight");
    return false;
  }

  void* owned_ = nullptr;
};

#endif  // POLICY_TORCH_WEIGHT_H_
