"""CPU kernels for int8 and float8 products on numpy arrays.

The kernels are a native library behind a plain C interface (``csrc/policy_kernels.h``), reached with
ctypes. This package needs numpy only. Where the library was not built, importing still works,
``available()`` is False and every kernel raises ``KernelsUnavailableError``.
"""

from ._batched import linear_batched as linear_batched
from ._linear import linear_f8 as linear_f8
from ._linear import linear_f8w as linear_f8w
from ._linear import linear_s8 as linear_s8
from ._linear import linear_s8_codes as linear_s8_codes
from ._linear import linear_s8w as linear_s8w
from ._loader import BuildInfo as BuildInfo
from ._loader import KernelsBrokenError as KernelsBrokenError
from ._loader import KernelsUnavailableError as KernelsUnavailableError
from ._loader import available as available
from ._loader import build_info as build_info
from ._loader import kernel_name as kernel_name
from ._loader import num_threads as num_threads
from ._loader import set_isa as set_isa
from ._loader import set_num_threads as set_num_threads
from ._packed import PackedWeight as PackedWeight
from ._packed import pack as pack
from ._quantize import decode_f8 as decode_f8
from ._quantize import encode_f8 as encode_f8
from ._quantize import quantize_rows_f8 as quantize_rows_f8
from ._quantize import quantize_rows_s8 as quantize_rows_s8
from ._rows import dequantize_rows as dequantize_rows
