/* The C interface of the policy-core CPU kernels.
 *
 * Conventions, for every function below unless it says otherwise:
 *
 * - Matrices are row major. Sizes and strides are counted in elements. `ld*` is the distance from
 *   one row to the next and must be at least the row's length, also where there is only one row.
 * - Weights are [n][k]: one row per output channel.
 * - Codes and scales obey `value = code * scale`, with float32 scales.
 * - A pointer may be NULL where what it points to has no elements.
 * - Outputs must not overlap inputs or each other. Inputs may overlap. Pointers need only the
 *   alignment of their element type.
 * - A function returns PK_OK, or an error code, in which case `pk_last_error()` says what was
 *   expected and what came. After an error the outputs hold nothing useful; nothing was written
 *   when the code is PK_ERR_ARGUMENT.
 * - Every function may be called from several threads at once.
 */
#ifndef POLICY_KERNELS_H_
#define POLICY_KERNELS_H_

#include <stdint.h>

#define PK_ABI_VERSION 1
#define PK_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t pk_status;
enum {
  PK_OK = 0,
  PK_ERR_ARGUMENT = 1,    /* a size, stride, pointer, format or scale that is not allowed */
  PK_ERR_MEMORY = 2,      /* a scratch buffer could not be allocated */
  PK_ERR_UNSUPPORTED = 3, /* an instruction set or operation that is not here */
};

typedef int32_t pk_format;
enum {
  PK_F8_E4M3FN = 0, /* 1 sign, 4 exponent (bias 7), 3 mantissa; max 448; no infinity; NaN 0x7f */
  PK_F8_E5M2 = 1,   /* 1 sign, 5 exponent (bias 15), 2 mantissa; max 57344; inf 0x7c; NaN 0x7e */
};

/* The version of this interface; a caller compares it with the PK_ABI_VERSION it was written for.
 */
PK_API int32_t pk_abi_version(void);

/* "compiler=<name and version>;isas=<names, comma separated, plainest first>". A static string. */
PK_API const char* pk_build_info(void);

/* What was wrong with this thread's latest failing call; "" when none failed. Valid until the
 * thread's next failing call. */
PK_API const char* pk_last_error(void);

/* The name of the instruction set whose kernels run now. A static string. */
PK_API const char* pk_isa(void);

/* Makes the whole process use the kernels of one instruction set.
 * name: one of the names in pk_build_info() that this CPU has.
 * PK_ERR_UNSUPPORTED: the name is unknown, or this CPU or build lacks it. */
PK_API pk_status pk_set_isa(const char* name);

/* The name of the kernel that serves an operation now: "linear_s8" -> "linear_s8_scalar".
 * op: the name of a function below, without `pk_`. Returns a static string, or NULL with
 * pk_last_error() set when there is no such operation. */
PK_API const char* pk_kernel_name(const char* op);

/* int8 codes of each row: amax = max(max|x|, 2^-100), scale = amax / 127,
 * code = clip(round_half_even(x * (127 / amax)), -127, 127), all in float32.
 * A row that holds a NaN or an infinity gets scale NaN and codes 0.
 * x     [m][k] float32, row stride ldx
 * codes [m][k] int8, row stride ldq (out)
 * scale [m] float32 (out) */
PK_API pk_status pk_quantize_rows_s8(int64_t m, int64_t k, const float* x, int64_t ldx,
                                     int8_t* codes, int64_t ldq, float* scale);

/* float8 codes of n values under one scale: x / scale in float32, clamped to the format's largest
 * finite value, rounded to nearest even; subnormals are kept. A NaN gives the NaN code of its sign;
 * infinities give the largest finite value of their sign.
 * scale: greater than 0 and finite; or NaN, which makes every code NaN.
 * codes [n] (out) */
PK_API pk_status pk_encode_f8(pk_format format, int64_t n, const float* x, float scale,
                              uint8_t* codes);

/* float8 codes of each row: scale = max(max|x|, 2^-100) / (the format's largest finite value),
 * codes as pk_encode_f8 gives them. A row that holds a NaN or an infinity gets scale NaN and, in
 * every element, the positive NaN code. x     [m][k] float32, row stride ldx codes [m][k], row
 * stride ldq (out) scale [m] float32 (out) */
PK_API pk_status pk_quantize_rows_f8(pk_format format, int64_t m, int64_t k, const float* x,
                                     int64_t ldx, uint8_t* codes, int64_t ldq, float* scale);

/* The float32 value of each float8 code; exact. NaN codes give a quiet NaN of their sign.
 * y [n] float32 (out) */
PK_API pk_status pk_decode_f8(pk_format format, int64_t n, const uint8_t* codes, float* y);

/* y = float32(acc) * (x_scale * w_scale) + bias, where x's rows are first quantized as
 * pk_quantize_rows_s8 does and acc is the int32 sum of code products. The multiplications and the
 * addition are each rounded to float32. Where k > 131072, acc is summed in parts of 131072
 * that are converted to float32 and added, first to last, in float32.
 * A row of x that holds a NaN or an infinity gives a row of NaN.
 * x       [m][k] float32, row stride ldx
 * w       [n][k] int8, row stride ldw
 * w_scale [n] float32
 * bias    [n] float32, or NULL for none
 * y       [m][n] float32, row stride ldy (out)
 * PK_ERR_MEMORY: a buffer of 8 rows of codes could not be allocated. */
PK_API pk_status pk_linear_s8(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                              const int8_t* w, int64_t ldw, const float* w_scale, const float* bias,
                              float* y, int64_t ldy);

/* pk_linear_s8 for rows that are quantized already. Codes of -128 are allowed; the sum of one part
 * wraps modulo 2^32, which takes codes of -128 on both sides all along the part.
 * x       [m][k] int8, row stride ldx
 * x_scale [m] float32; a NaN gives a row of NaN */
PK_API pk_status pk_linear_s8_codes(int64_t m, int64_t n, int64_t k, const int8_t* x, int64_t ldx,
                                    const float* x_scale, const int8_t* w, int64_t ldw,
                                    const float* w_scale, const float* bias, float* y, int64_t ldy);

/* Weight only: y = (sum_k x * w) * w_scale + bias, the sum rounded to float32 once it is whole or
 * as it grows, the rest as in pk_linear_s8. */
PK_API pk_status pk_linear_s8w(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                               const int8_t* w, int64_t ldw, const float* w_scale,
                               const float* bias, float* y, int64_t ldy);

/* y = acc * (x_scale * w_scale) + bias, where acc is the sum of products of decoded codes, in at
 * least float32. The result is within 1e-6 * sum_k |x * w| of the exact one (scales included).
 * x [m][k] codes of x_format, row stride ldx;  w [n][k] codes of w_format, row stride ldw
 * x_scale, w_scale: float32; stride 1: one per row of x or w; stride 0: one for all
 * bias [n] float32, or NULL for none
 * y    [m][n] float32, row stride ldy (out)
 * PK_ERR_MEMORY: a buffer of 9 decoded rows could not be allocated. */
PK_API pk_status pk_linear_f8(int64_t m, int64_t n, int64_t k, pk_format x_format, const uint8_t* x,
                              int64_t ldx, const float* x_scale, int64_t x_scale_stride,
                              pk_format w_format, const uint8_t* w, int64_t ldw,
                              const float* w_scale, int64_t w_scale_stride, const float* bias,
                              float* y, int64_t ldy);

/* Weight only: y = (sum_k x * decode(w)) * w_scale + bias; the other words as in pk_linear_f8. */
PK_API pk_status pk_linear_f8w(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx,
                               pk_format w_format, const uint8_t* w, int64_t ldw,
                               const float* w_scale, int64_t w_scale_stride, const float* bias,
                               float* y, int64_t ldy);

#ifdef __cplusplus
}
#endif

#endif /* POLICY_KERNELS_H_ */
