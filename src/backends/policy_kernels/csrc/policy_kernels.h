/* The C interface of the policy-core CPU kernels.
 *
 * Conventions, for every function below unless it says otherwise:
 *
 * - Matrices are row major. Sizes and strides are counted in elements. `ld*` is the distance from
 *   one row to the next and must be at least the row's length, also where there is only one row.
 * - Weights are [n][k]: one row per output channel. Products take them packed, see pk_pack.
 * - Codes and scales obey `value = code * scale`, with float32 scales.
 * - A pointer may be NULL where what it points to has no elements.
 * - Outputs must not overlap inputs or each other. Inputs may overlap. Pointers need only the
 *   alignment of their element type.
 * - A function returns PK_OK, or an error code, in which case `pk_last_error()` says what was
 *   expected and what came. After an error the outputs hold nothing useful; nothing was written
 *   when the code is PK_ERR_ARGUMENT.
 * - Every function may be called from several threads at once, from inside a task of an executor,
 *   and in the child of a fork.
 * - Memory that a product needs for itself is kept by the calling thread for its next call.
 */
#ifndef POLICY_KERNELS_H_
#define POLICY_KERNELS_H_

#include <stdint.h>

#define PK_ABI_VERSION 3
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
  PK_S8 = 2,        /* two's complement; in pk_pack and pk_unpack only */
};

typedef int32_t pk_dtype;
enum {
  PK_FLOAT32 = 0,
  PK_BFLOAT16 = 1, /* the upper half of a float32 */
  PK_FLOAT16 = 2,  /* IEEE 754 binary16 */
};

/* The version of this interface; a caller compares it with the PK_ABI_VERSION it was written for.
 */
PK_API int32_t pk_abi_version(void);

/* "compiler=<name and version>;isas=<names, comma separated, plainest first>". A static string. */
PK_API const char* pk_build_info(void);

/* The names of the compiled instruction sets that this CPU has, comma separated, plainest first.
 * A static string. */
PK_API const char* pk_present_isas(void);

/* What came of asking the system for the AMX tile registers: "granted"; "absent" where the CPU,
 * the system or the build has none; "refused: <reason>"; "emulated" in a build for tests. */
PK_API const char* pk_amx_permission(void);

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
 * op: the name of a quantizer or product below, without `pk_`. Returns a string that lives until
 * the thread's next call of this function, or NULL with pk_last_error() set when there is no such
 * operation. */
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

/* How the parts of one product are spread over threads that someone else owns. The caller works
 * too, and waits only for parts that have begun, so a pool whose threads are all busy, or all
 * waiting in products themselves, cannot deadlock.
 * threads: how many may work at once, the caller included; at least 1
 * submit:  arranges for task(argument) to run once, on any thread, now or later, even after the
 *          product has returned
 * run:     for pools that fork and join: runs task(argument) up to `threads` times, all at once if
 *          it can, and returns when all of them have returned; where it is not NULL, submit is not
 *          called
 * Both may be NULL where threads is 1. */
typedef struct pk_executor {
  int32_t threads;
  void (*submit)(void* context, void (*task)(void* argument), void* argument);
  void* context;
  void (*run)(void* context, int32_t threads, void (*task)(void* argument), void* argument);
} pk_executor;

/* How many threads products use that are given no executor.
 * count: at least 1; or 0 for the default: the environment's POLICY_NUM_THREADS, else as many as
 * the CPU affinity and the cgroup quota leave this process. */
PK_API pk_status pk_set_num_threads(int64_t count);
PK_API int64_t pk_num_threads(void);

/* pk_encode_f8 for rows that each have a scale, or one for all, on several threads.
 * executor NULL for the library's own threads
 * x     [m][k] float32, row stride ldx
 * scale stride 1: one per row; stride 0: one for all
 * codes [m][k], row stride ldq (out) */
PK_API pk_status pk_encode_rows_f8(const pk_executor* executor, pk_format format, int64_t m,
                                   int64_t k, const float* x, int64_t ldx, const float* scale,
                                   int64_t scale_stride, uint8_t* codes, int64_t ldq);

/* Rows of a quantized table: y[i] = codes[ids[i]] * scale, multiplied in float32 and rounded once.
 * executor NULL for the library's own threads
 * ids      [count], each at least 0 and less than rows; PK_ERR_ARGUMENT otherwise
 * code     what the codes are: PK_S8, PK_F8_E4M3FN or PK_F8_E5M2
 * codes    [rows][width], row stride ldw; not packed
 * scale    float32; stride 1: one per row of the table; stride 0: one for all
 * y        [count][width] of y_dtype, row stride ldy (out) */
PK_API pk_status pk_dequantize_rows(const pk_executor* executor, int64_t count, const int64_t* ids,
                                    pk_format code, int64_t rows, int64_t width, const void* codes,
                                    int64_t ldw, const float* scale, int64_t scale_stride,
                                    pk_dtype y_dtype, void* y, int64_t ldy);

/* The same from a table that pk_pack packed, with rows as its n and width as its k.
 * w        a packed weight of rows, width and code */
PK_API pk_status pk_dequantize_packed_rows(const pk_executor* executor, int64_t count,
                                           const int64_t* ids, pk_format code, int64_t rows,
                                           int64_t width, const void* w, const float* scale,
                                           int64_t scale_stride, pk_dtype y_dtype, void* y,
                                           int64_t ldy);

/* The size of a packed weight [n][k]: all padding, and 63 bytes of room to align it, included.
 *
 * A packed weight is made of panels of 32 channels, each of pk_packed_bytes(64, k) -
 * pk_packed_bytes(32, k) bytes, from its first address that is a multiple of 64 on. Some panels in
 * a row are a packed weight as well, n being the number of their channels.
 * bytes (out) */
PK_API pk_status pk_packed_bytes(int64_t n, int64_t k, int64_t* bytes);

/* Lays weights out in the one order that all kernels read (docs/kernels.md has a picture).
 * code   what the codes are: PK_S8, PK_F8_E4M3FN or PK_F8_E5M2
 * w      [n][k] codes, row stride ldw
 * packed pk_packed_bytes(n, k) bytes at any address (out). The content depends on the address
 *        modulo 64: to move a packed weight, unpack it and pack it again. */
PK_API pk_status pk_pack(pk_format code, int64_t n, int64_t k, const void* w, int64_t ldw,
                         void* packed);

/* pk_pack on an executor; NULL for the library's own threads. */
PK_API pk_status pk_pack_on(const pk_executor* executor, pk_format code, int64_t n, int64_t k,
                            const void* w, int64_t ldw, void* packed);

/* The exact inverse of pk_pack; n, k and code must be those that it was given.
 * w [n][k], row stride ldw (out) */
PK_API pk_status pk_unpack(pk_format code, int64_t n, int64_t k, const void* packed, void* w,
                           int64_t ldw);

/* pk_unpack on an executor; NULL for the library's own threads. */
PK_API pk_status pk_unpack_on(const pk_executor* executor, pk_format code, int64_t n, int64_t k,
                              const void* packed, void* w, int64_t ldw);

/* y = float32(acc) * (x_scale * w_scale) + bias, where x's rows are first quantized as
 * pk_quantize_rows_s8 does and acc is the int32 sum of code products. The multiplications and the
 * addition are each rounded to float32, and y once to its dtype. Where k > 131072, acc is summed
 * in parts of 131072 that are converted to float32 and added, first to last, in float32.
 * A row of x that holds a NaN or an infinity gives a row of NaN.
 * executor NULL for the library's own threads
 * x        [m][k] of x_dtype, row stride ldx
 * w        a packed weight of n, k and PK_S8
 * w_scale  [n] float32
 * bias     [n] of bias_dtype, or NULL for none
 * y        [m][n] of y_dtype, row stride ldy (out)
 * PK_ERR_MEMORY: there is no memory for a block of quantized rows. */
PK_API pk_status pk_linear_s8(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                              pk_dtype x_dtype, const void* x, int64_t ldx, const void* w,
                              const float* w_scale, pk_dtype bias_dtype, const void* bias,
                              pk_dtype y_dtype, void* y, int64_t ldy);

/* pk_linear_s8 for rows that are quantized already. Codes of -128 are allowed; the sum of one part
 * wraps modulo 2^32, which takes codes of -128 on both sides all along the part.
 * x       [m][k] int8, row stride ldx
 * x_scale [m] float32; a NaN gives a row of NaN */
PK_API pk_status pk_linear_s8_codes(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                                    const int8_t* x, int64_t ldx, const float* x_scale,
                                    const void* w, const float* w_scale, pk_dtype bias_dtype,
                                    const void* bias, pk_dtype y_dtype, void* y, int64_t ldy);

/* Weight only: y = (sum_k x * w) * w_scale + bias. The sum is within 1e-6 * sum_k |x * w| of the
 * exact one; the rest as in pk_linear_s8. */
PK_API pk_status pk_linear_s8w(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                               pk_dtype x_dtype, const void* x, int64_t ldx, const void* w,
                               const float* w_scale, pk_dtype bias_dtype, const void* bias,
                               pk_dtype y_dtype, void* y, int64_t ldy);

/* y = acc * (x_scale * w_scale) + bias, where acc is the sum of products of decoded codes, in at
 * least float32. The result is within 1e-6 * sum_k |x * w| of the exact one (scales included).
 * x [m][k] codes of x_format, row stride ldx;  w a packed weight of n, k and w_format
 * x_scale, w_scale: float32; stride 1: one per row of x or w; stride 0: one for all
 * the other words as in pk_linear_s8 */
PK_API pk_status pk_linear_f8(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                              pk_format x_format, const uint8_t* x, int64_t ldx,
                              const float* x_scale, int64_t x_scale_stride, pk_format w_format,
                              const void* w, const float* w_scale, int64_t w_scale_stride,
                              pk_dtype bias_dtype, const void* bias, pk_dtype y_dtype, void* y,
                              int64_t ldy);

/* Weight only: y = (sum_k x * decode(w)) * w_scale + bias; the other words as in pk_linear_f8. */
PK_API pk_status pk_linear_f8w(const pk_executor* executor, int64_t m, int64_t n, int64_t k,
                               pk_dtype x_dtype, const void* x, int64_t ldx, pk_format w_format,
                               const void* w, const float* w_scale, int64_t w_scale_stride,
                               pk_dtype bias_dtype, const void* bias, pk_dtype y_dtype, void* y,
                               int64_t ldy);

typedef int32_t pk_operation;
enum {
  PK_LINEAR_S8 = 0,
  PK_LINEAR_S8_CODES = 1,
  PK_LINEAR_S8W = 2,
  PK_LINEAR_F8 = 3,
  PK_LINEAR_F8W = 4,
};

/* From each product of a batch to the next, in elements; 0 where all products share an operand. */
typedef struct pk_steps {
  int64_t x, x_scale, w_scale, bias, y;
} pk_steps;

/* `count` products of one kind and size, each with a weight of its own; small ones run side by
 * side. operation        which of the products above steps            y must step over whole
 * results where count > 1 x_type           the pk_dtype or, for PK_LINEAR_F8, the pk_format of x;
 * PK_S8 for PK_LINEAR_S8_CODES x_scale          for PK_LINEAR_S8_CODES and PK_LINEAR_F8, as there;
 * NULL for the others w                [count] packed weights of n, k and w_code w_scale_stride   1
 * where w_code is PK_S8 the other words as in the product itself, and about product 0 where there
 * is a step After PK_ERR_ARGUMENT nothing was written. */
PK_API pk_status pk_linear_batched(const pk_executor* executor, pk_operation operation,
                                   int64_t count, const pk_steps* steps, int64_t m, int64_t n,
                                   int64_t k, int32_t x_type, const void* x, int64_t ldx,
                                   const float* x_scale, int64_t x_scale_stride, pk_format w_code,
                                   const void* const* w, const float* w_scale,
                                   int64_t w_scale_stride, pk_dtype bias_dtype, const void* bias,
                                   pk_dtype y_dtype, void* y, int64_t ldy);

#ifdef __cplusplus
}
#endif

#endif /* POLICY_KERNELS_H_ */
