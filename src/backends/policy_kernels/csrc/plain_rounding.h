/* The floating point mode that the kernels' bits are defined with.
 *
 * Threads of XLA and TensorFlow take subnormal numbers for zeros; a binding sets the plain mode
 * around its calls. */
#ifndef POLICY_KERNELS_PLAIN_ROUNDING_H_
#define POLICY_KERNELS_PLAIN_ROUNDING_H_

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

class PlainRounding {
 public:
#if defined(__SSE__)
  PlainRounding() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainRounding() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  PlainRounding() {}
#endif
};

#endif  // POLICY_KERNELS_PLAIN_ROUNDING_H_
