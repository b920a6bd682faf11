"""The functions of the native library, as csrc/policy_kernels.h declares them."""

from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p

# PK_ABI_VERSION of csrc/policy_kernels.h that the signatures are written for.
ABI_VERSION = 3

_SIZE, _STRIDE, _POINTER, _KIND = c_int64, c_int64, c_void_p, c_int32
_HEAD = [_POINTER, *[_SIZE] * 3]
_ROWS = [_POINTER, _STRIDE]
_OUT = [_KIND, _POINTER, _KIND, _POINTER, _STRIDE]
_LINEAR = [*_HEAD, _KIND, *_ROWS, _POINTER, _POINTER, *_OUT]
SIGNATURES: dict[str, tuple[type, Sequence[type]]] = {
    "pk_build_info": (c_char_p, []),
    "pk_last_error": (c_char_p, []),
    "pk_isa": (c_char_p, []),
    "pk_set_isa": (c_int32, [c_char_p]),
    "pk_kernel_name": (c_char_p, [c_char_p]),
    "pk_quantize_rows_s8": (c_int32, [_SIZE] * 2 + [_POINTER, _STRIDE] * 2 + [_POINTER]),
    "pk_encode_f8": (c_int32, [_KIND, _SIZE, _POINTER, c_float, _POINTER]),
    "pk_encode_rows_f8": (
        c_int32,
        [_POINTER, _KIND, _SIZE, _SIZE, *_ROWS, *_ROWS, *_ROWS],
    ),
    "pk_quantize_rows_f8": (
        c_int32,
        [_KIND] + [_SIZE] * 2 + [_POINTER, _STRIDE] * 2 + [_POINTER],
    ),
    "pk_decode_f8": (c_int32, [_KIND, _SIZE, _POINTER, _POINTER]),
    "pk_dequantize_rows": (
        c_int32,
        [_POINTER, _SIZE, _POINTER, _KIND, _SIZE, _SIZE, *_ROWS, _POINTER, _STRIDE, _KIND, *_ROWS],
    ),
    "pk_dequantize_packed_rows": (
        c_int32,
        [_POINTER, _SIZE, _POINTER, _KIND, _SIZE, _SIZE, *[_POINTER] * 2, _STRIDE, _KIND, *_ROWS],
    ),
    "pk_present_isas": (c_char_p, []),
    "pk_amx_permission": (c_char_p, []),
    "pk_set_num_threads": (c_int32, [_SIZE]),
    "pk_num_threads": (c_int64, []),
    "pk_packed_bytes": (c_int32, [_SIZE, _SIZE, _POINTER]),
    "pk_pack": (c_int32, [_KIND, _SIZE, _SIZE, *_ROWS, _POINTER]),
    "pk_unpack": (c_int32, [_KIND, _SIZE, _SIZE, _POINTER, *_ROWS]),
    "pk_pack_on": (c_int32, [_POINTER, _KIND, _SIZE, _SIZE, *_ROWS, _POINTER]),
    "pk_unpack_on": (c_int32, [_POINTER, _KIND, _SIZE, _SIZE, _POINTER, *_ROWS]),
    "pk_linear_s8": (c_int32, _LINEAR),
    "pk_linear_s8_codes": (c_int32, [*_HEAD, *_ROWS, *[_POINTER] * 3, *_OUT]),
    "pk_linear_s8w": (c_int32, _LINEAR),
    "pk_linear_f8": (
        c_int32,
        [*_HEAD, _KIND, *_ROWS, _POINTER, _STRIDE, _KIND, _POINTER, _POINTER, _STRIDE, *_OUT],
    ),
    "pk_linear_f8w": (
        c_int32,
        [*_HEAD, _KIND, *_ROWS, _KIND, _POINTER, _POINTER, _STRIDE, *_OUT],
    ),
    "pk_linear_batched": (
        c_int32,
        [
            _POINTER,
            _KIND,
            _SIZE,
            _POINTER,
            *([_SIZE] * 3),
            _KIND,
            *_ROWS,
            *_ROWS,
            _KIND,
            _POINTER,
            *_ROWS,
            *_OUT,
        ],
    ),
}
