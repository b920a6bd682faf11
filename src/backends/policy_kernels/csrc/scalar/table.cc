#include "scalar/scalar.h"

namespace pk {

const KernelTable scalar_kernels = {
    "scalar",
    {"quantize_rows_s8_scalar", scalar::quantize_rows_s8},
    {"encode_f8_scalar", scalar::encode_f8},
    {"quantize_rows_f8_scalar", scalar::quantize_rows_f8},
    {"decode_f8_scalar", scalar::decode_f8},
    {"linear_s8_scalar", scalar::linear_s8},
    {"linear_s8_codes_scalar", scalar::linear_s8_codes},
    {"linear_s8w_scalar", scalar::linear_s8w},
    {"linear_f8_scalar", scalar::linear_f8},
    {"linear_f8w_scalar", scalar::linear_f8w},
};

}  // namespace pk
