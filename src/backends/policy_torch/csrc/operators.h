/* The operators of policy_core_v1 on a CPU; _kernels.py says what each gives. */
#ifndef POLICY_TORCH_OPERATORS_H_
#define POLICY_TORCH_OPERATORS_H_

#include "call.h"
#include "executor.h"

void linear_s8(Call& call);
void linear_s8w(Call& call);
void linear_f8(Call& call);
void linear_f8w(Call& call);
void packed_linear_s8(Call& call);
void packed_linear_s8w(Call& call);
void packed_linear_f8(Call& call);
void packed_linear_f8w(Call& call);
void unpack(Call& call);
void packed_rows(Call& call);
void encode_f8(Call& call);
void scale_f8(Call& call);
void quantize_rows_f8(Call& call);

/* Floats as float8 codes under one scale, of one float32. */
View encoded(Call& call, const TorchExecutor& executor, const View& x, const View& scale,
             pk_format format);
/* Floats as float8_e4m3fn codes, and the scales of their rows, float32 of shape (m,). */
View quantized_rows(Call& call, const TorchExecutor& executor, const View& x, View* scale);

#endif  // POLICY_TORCH_OPERATORS_H_
