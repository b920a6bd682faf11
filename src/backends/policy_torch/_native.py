"""The native CPU kernels on tensors' own memory, by way of Python: packing, and the operators where
there are none in C.

A packed weight is a uint8 tensor with the codes in the one layout that all kernels read. Its content
depends on its address modulo 64, which is 0 for all memory that torch allocates.
"""

import ctypes
import functools
import math
import os

import torch

import policy_kernels
from policy_kernels._loader import check, library

_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}


@functools.cache
def outruns_torch(operation: str) -> bool:
    """Says whether a native kernel is there and is not the scalar one, which torch outruns."""
    if not policy_kernels.available():
        return False
    return not policy_kernels.kernel_name(operation).endswith("scalar")


class _Threads:
    """Makes the kernels use as many threads as torch, unless someone asked the kernels for others.

    Attributes:
        seen: torch's number when it was last looked at.
        ours: The kernels' number that nobody but us has set.
    """

    def __init__(self) -> None:
        self.seen: int | None = None
        self.ours = policy_kernels.num_threads() if policy_kernels.available() else 0
        self.asked = "POLICY_NUM_THREADS" in os.environ

    def follow(self) -> None:
        """Looks at torch's number, and passes a change on."""
        count = torch.get_num_threads()
        if count == self.seen:
            return
        self.seen = count
        if not self.asked and policy_kernels.num_threads() == self.ours:
            policy_kernels.set_num_threads(count)
            self.ours = count


_THREADS = _Threads()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Gives codes of shape (n, k), int8 or float8, packed."""
    # torch turns a matrix ten times faster than the kernels do.
    codes = codes.detach().contiguous()
    n, k = codes.shape
    size = ctypes.c_int64()
    check(library().pk_packed_bytes(n, k, ctypes.addressof(size)))
    packed = torch.empty(size.value, dtype=torch.uint8, device="cpu")
    kind = _CODES[codes.dtype]
    check(library().pk_pack(kind, n, k, codes.data_ptr(), max(k, 1), packed.data_ptr()))
    return packed


def unpack(packed: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Gives the codes of shape (n, k) that were packed."""
    codes = torch.empty((n, k), dtype=dtype, device="cpu")
    packed = _aligned(packed)
    kind = _CODES[dtype]
    check(library().pk_unpack(kind, n, k, packed.data_ptr(), codes.data_ptr(), max(k, 1)))
    return codes


def linear(
    operation: str,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    packed: torch.Tensor,
    n: int,
    codes_dtype: torch.dtype,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives the product of one operation.

    Args:
        operation: `"linear_s8"`, `"linear_s8w"`, `"linear_f8"` or `"linear_f8w"`.
        x: Floats, or float8 codes for `"linear_f8"`, of shape (..., k) with any strides.
        x_scale: Their scales, float32 with one a row or one for all, for `"linear_f8"` alone.
        packed: A packed weight of shape (n, k).
        n: The number of output channels.
        codes_dtype: What was packed.
        scale: float32 of shape (n,); for float8 also ().
        bias: Floats of shape (n,), or None.
        dtype: The dtype of the result.
    """
    native = library()
    _THREADS.follow()
    leading = x.shape[:-1]
    x, scale, packed = _rows(x), scale.contiguous(), _aligned(packed)
    bias = None if bias is None else _kernel_float(bias).contiguous()
    m, k = x.shape
    inside = dtype if dtype in _FLOATS else torch.float32
    y = torch.empty((m, n), dtype=inside, device="cpu")
    head = (None, m, n, k)
    rows = (x.data_ptr(), max(x.stride(0), k, 1) if m > 1 else max(k, 1))
    weight, scales = packed.data_ptr(), scale.data_ptr()
    tail = (
        0 if bias is None else _FLOATS[bias.dtype],
        None if bias is None else bias.data_ptr(),
        _FLOATS[inside],
        y.data_ptr(),
        n,
    )
    if operation == "linear_s8":
        status = native.pk_linear_s8(*head, _FLOATS[x.dtype], *rows, weight, scales, *tail)
    elif operation == "linear_s8w":
        status = native.pk_linear_s8w(*head, _FLOATS[x.dtype], *rows, weight, scales, *tail)
    else:
        code = (_CODES[codes_dtype], weight, scales, int(scale.numel() == n))
        if operation == "linear_f8w":
            status = native.pk_linear_f8w(*head, _FLOATS[x.dtype], *rows, *code, *tail)
        else:
            assert x_scale is not None
            x_scale = x_scale.contiguous()
            inputs = (_CODES[x.dtype], *rows, x_scale.data_ptr(), int(x_scale.numel() == m))
            status = native.pk_linear_f8(*head, *inputs, *code, *tail)
    if status:
        check(status)
    y = y if inside == dtype else y.to(dtype)
    return y if len(leading) == 1 else y.unflatten(0, leading) if leading else y[0]


def packed_rows(
    ids: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    k: int,
    codes_dtype: torch.dtype,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `codes[ids] * scale[ids]`, rounded once, for a packed table of shape (n, k)."""
    ids, packed, scale = ids.long().contiguous(), _aligned(packed), scale.contiguous()
    inside = dtype if dtype in _FLOATS else torch.float32
    y = torch.empty((*ids.shape, k), dtype=inside, device="cpu")
    head = (None, ids.numel(), ids.data_ptr(), _CODES[codes_dtype], n, k)
    stride = int(scale.numel() == n)
    tail = (packed.data_ptr(), scale.data_ptr(), stride, _FLOATS[inside], y.data_ptr(), max(k, 1))
    check(library().pk_dequantize_packed_rows(*head, *tail))
    return y.to(dtype)


def encode_f8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives the float8 codes of a tensor under one scale."""
    x = x.detach().float().contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device="cpu")
    size, kind = x.numel(), _CODES[dtype]
    check(library().pk_encode_f8(kind, size, x.data_ptr(), scale.item(), codes.data_ptr()))
    return codes


def quantize_rows_f8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the float8_e4m3fn codes of rows, and their scales, float32 of shape (m,)."""
    x = x.detach().float().contiguous()
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cpu")
    scale = torch.empty(m, dtype=torch.float32, device="cpu")
    kind, stride = _CODES[codes.dtype], max(k, 1)
    pointers = codes.data_ptr(), stride, scale.data_ptr()
    check(library().pk_quantize_rows_f8(kind, m, k, x.data_ptr(), stride, *pointers))
    return codes, scale


def _kernel_float(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in _FLOATS else x.float()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Gives rows as a matrix: themselves where they are contiguous and do not overlap, else a copy."""
    x = x if x.dtype in _CODES else _kernel_float(x)
    x = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    m, k = x.shape
    usable = (k <= 1 or x.stride(1) == 1) and (m <= 1 or x.stride(0) >= k)
    return x if usable else x.contiguous()


def _aligned(packed: torch.Tensor) -> torch.Tensor:
    """Gives a packed weight at an address that suits its content."""
    return packed if packed.data_ptr() % 64 == 0 else packed.clone()
