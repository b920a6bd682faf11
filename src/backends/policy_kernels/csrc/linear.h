// The driver of all products: cuts the work into tiles of rows and panels of channels, fills tiles
// and multiplies them in one parallel region.
#pragma once

#include "kernels.h"
#include "packed.h"

namespace pk {

// What x is.
enum class Input {
  kQuantized,  // floats, quantized to int8 on the way
  kCodesS8,    // int8
  kFloats,     // floats, multiplied as they are
  kCodesF8,    // float8 codes, multiplied as they are
};

struct Linear {
  const pk_executor* executor;
  int64_t m;
  Input input;
  int32_t x_type;  // pk_dtype of floats, pk_format of float8 codes
  const void* x;
  int64_t ldx;
  Packed w;
  pk_dtype bias_dtype;
  const void* bias;
  Output output;  // output.bias and, for kQuantized, output.x_scale are set by run()
};

// PK_OK or PK_ERR_MEMORY. m and n are positive; where k is 0, ldx is too.
pk_status run(Linear linear);

}  // namespace pk
