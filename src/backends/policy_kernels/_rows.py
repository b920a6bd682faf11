"""Rows of a quantized table."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import CODES, Matrix, describe, flat, float_dtype, float_number, matrix, scales
from ._loader import check, library
from ._packed import PackedWeight

INT64: np.dtype[Any] = np.dtype(np.int64)


def dequantize_rows(
    codes: NDArray[Any] | PackedWeight,
    scale: float | np.float32 | NDArray[np.float32],
    ids: NDArray[np.int64],
    dtype: Any = "float32",
) -> NDArray[Any]:
    """``codes[ids] * scale[ids]``, multiplied in float32 and rounded once.

    Args:
        codes: int8, or a float8 dtype, of shape (rows, width); or such codes, packed.
        scale: float32 of shape (rows,), or one for all.
        ids: int64 of any shape, each at least 0 and less than rows.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, or the dtype itself.

    Returns:
        An array of `dtype` and of shape (*ids.shape, width).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, or an id is out of range.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    if isinstance(codes, PackedWeight):
        rows, width = codes.n, codes.k
        table: list[int] = [codes._pointer]
        function, kind = native.pk_dequantize_packed_rows, codes.dtype
    else:
        plain = _table(codes)
        rows, width = plain.array.shape
        table = [plain.pointer, plain.stride]
        function, kind = native.pk_dequantize_rows, codes.dtype.name
    factors = scales("scale", scale, rows, for_all=True)
    chosen = flat("ids", ids, INT64)
    target = float_dtype("dtype", dtype)
    y = np.empty((*chosen.shape, width), target)
    head = (None, chosen.size, chosen.ctypes.data, CODES[kind], rows, width)
    tail = (float_number(target), y.ctypes.data, width)
    check(function(*head, *table, factors.pointer, factors.stride, *tail))
    return y


def _table(codes: Any) -> Matrix:
    if not isinstance(codes, np.ndarray) or codes.dtype.name not in CODES:
        raise TypeError(
            f"expected codes to be a {' or '.join(CODES)} array of shape (rows, width), "
            f"got {describe(codes)}"
        )
    bits = codes if codes.dtype == np.int8 else codes.view(np.uint8)
    return matrix("codes", bits, bits.dtype, "(rows, width)")
