"""Products of rows with quantized weights.

Weights are (n, k): one row per output channel, packed with ``pack``; plain codes are packed at each
call. Rows, biases and results are float32, bfloat16 (of ml_dtypes) or float16. 2-D arguments may have
any strides; a copy is made only where rows are not contiguous or overlap.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import FLOAT32, FORMATS, INT8, UINT8, floats, format_number, matrix, scales
from ._loader import check, library
from ._operands import (
    Floats,
    Scale,
    Weight,
    channel_bias,
    check_k,
    empty_result,
    packed_weight,
    weight_scales,
)
from ._packed import PackedWeight


def linear_s8(
    x: Floats,
    weight: Weight,
    scale: NDArray[np.float32],
    bias: Floats | None = None,
    *,
    dtype: object = None,
) -> Floats:
    """``x @ (codes * scale[:, None]).T + bias`` with the rows of x quantized to int8 on the way.

    The sum of code products is exact; scales and bias are applied in float32, each operation rounded
    by itself.

    Args:
        x: float32, bfloat16 or float16 (m, k). A row that holds a NaN or an infinity gives a row of
            NaN.
        weight: packed int8 codes, or int8 (n, k).
        scale: float32 (n,).
        bias: float32, bfloat16 or float16 (n,), or None.
        dtype: the result's dtype or its name; None for x's.

    Returns:
        Floats (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape.
        MemoryError: there is no memory for a block of quantized rows.
        KernelsUnavailableError: the library was not built.
    """
    return _linear_s8(library().pk_linear_s8, x, weight, scale, bias, dtype)


def linear_s8w(
    x: Floats,
    weight: Weight,
    scale: NDArray[np.float32],
    bias: Floats | None = None,
    *,
    dtype: object = None,
) -> Floats:
    """``(x @ codes.T) * scale + bias``: only the weights are quantized.

    Arguments, result and errors are those of ``linear_s8``.
    """
    return _linear_s8(library().pk_linear_s8w, x, weight, scale, bias, dtype)


def _linear_s8(
    function: Any, x: Floats, weight: Weight, scale: object, bias: object, dtype: object
) -> Floats:
    packed = packed_weight("weight", weight, "int8")
    check_k("x", x, packed)
    rows, x_number = floats("x", x, "(m, k)", packed.k)
    w_scale = weight_scales(packed, "scale", scale, for_all=False)
    added = channel_bias(packed, bias)
    m = len(rows.array)
    y, y_number = empty_result(m, packed.n, dtype, rows.array.dtype)
    status = function(
        None,
        m,
        packed.n,
        packed.k,
        x_number,
        rows.pointer,
        rows.stride,
        packed._pointer,
        w_scale.pointer,
        added.number,
        added.pointer or None,
        y_number,
        y.ctypes.data,
        packed.n,
    )
    if status:
        check(status)
    return y


def linear_s8_codes(
    x_codes: NDArray[np.int8],
    x_scale: NDArray[np.float32],
    weight: Weight,
    w_scale: NDArray[np.float32],
    bias: Floats | None = None,
    *,
    dtype: object = None,
) -> Floats:
    """``linear_s8`` for rows that are quantized already.

    Args:
        x_codes: int8 (m, k).
        x_scale: float32 (m,). A NaN gives a row of NaN.
        weight: packed int8 codes, or int8 (n, k).
        w_scale: float32 (n,).
        bias: float32, bfloat16 or float16 (n,), or None.
        dtype: the result's dtype or its name; None for float32.

    Returns:
        Floats (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape.
        MemoryError: there is no memory for a block of rows.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    rows = matrix("x_codes", x_codes, INT8, "(m, k)")
    m = len(rows.array)
    row_scale = scales("x_scale", x_scale, m, for_all=False)
    packed = packed_weight("weight", weight, "int8")
    check_k("x_codes", x_codes, packed)
    channel_scale = weight_scales(packed, "w_scale", w_scale, for_all=False)
    added = channel_bias(packed, bias)
    y, y_number = empty_result(m, packed.n, dtype, FLOAT32)
    check(
        native.pk_linear_s8_codes(
            None,
            m,
            packed.n,
            packed.k,
            rows.pointer,
            rows.stride,
            row_scale.pointer,
            packed._pointer,
            channel_scale.pointer,
            added.number,
            added.pointer or None,
            y_number,
            y.ctypes.data,
            packed.n,
        )
    )
    return y


def linear_f8(
    x_codes: NDArray[np.uint8],
    x_scale: Scale,
    x_format: str,
    weight: Weight,
    w_scale: Scale,
    w_format: str,
    bias: Floats | None = None,
    *,
    dtype: object = None,
) -> Floats:
    """``(x @ w.T) * (x_scale * w_scale) + bias`` of float8 codes.

    Args:
        x_codes: bits of the codes, uint8 (m, k).
        x_scale: float32 (m,), or a float or float32 () for all rows.
        x_format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        weight: packed codes of w_format, or their bits, uint8 (n, k).
        w_scale: float32 (n,), or a float or float32 () for all channels.
        w_format: as x_format.
        bias: float32, bfloat16 or float16 (n,), or None.
        dtype: the result's dtype or its name; None for float32.

    Returns:
        Floats (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, or a format is unknown.
        MemoryError: there is no memory for a block of decoded rows.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    rows = matrix("x_codes", x_codes, UINT8, "(m, k)")
    m = len(rows.array)
    row_scale = scales("x_scale", x_scale, m, for_all=True)
    x_number = format_number("x_format", x_format)
    w_number = format_number("w_format", w_format)
    packed = packed_weight("weight", weight, w_format)
    check_k("x_codes", x_codes, packed)
    channel_scale = weight_scales(packed, "w_scale", w_scale, for_all=True)
    added = channel_bias(packed, bias)
    y, y_number = empty_result(m, packed.n, dtype, FLOAT32)
    check(
        native.pk_linear_f8(
            None,
            m,
            packed.n,
            packed.k,
            x_number,
            rows.pointer,
            rows.stride,
            row_scale.pointer,
            row_scale.stride,
            w_number,
            packed._pointer,
            channel_scale.pointer,
            channel_scale.stride,
            added.number,
            added.pointer or None,
            y_number,
            y.ctypes.data,
            packed.n,
        )
    )
    return y


def linear_f8w(
    x: Floats,
    weight: Weight,
    scale: Scale,
    format: str | None = None,
    bias: Floats | None = None,
    *,
    dtype: object = None,
) -> Floats:
    """``(x @ decode_f8(codes, format).T) * scale + bias``: only the weights are quantized.

    Args:
        x: float32, bfloat16 or float16 (m, k).
        weight: packed float8 codes, or their bits, uint8 (n, k).
        scale: float32 (n,), or a float or float32 () for all channels.
        format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``; None for that of a packed weight.
        bias: float32, bfloat16 or float16 (n,), or None.
        dtype: the result's dtype or its name; None for x's.

    Returns:
        Floats (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, or the format is unknown.
        MemoryError: there is no memory for a block of rows.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    if format is None and isinstance(weight, PackedWeight):
        format = weight.dtype
    number = FORMATS.get(format) if isinstance(format, str) else None
    if number is None:
        number = format_number("format", format)
    packed = packed_weight("weight", weight, str(format))
    check_k("x", x, packed)
    rows, x_number = floats("x", x, "(m, k)", packed.k)
    w_scale = weight_scales(packed, "scale", scale, for_all=True)
    added = channel_bias(packed, bias)
    m = len(rows.array)
    y, y_number = empty_result(m, packed.n, dtype, rows.array.dtype)
    status = native.pk_linear_f8w(
        None,
        m,
        packed.n,
        packed.k,
        x_number,
        rows.pointer,
        rows.stride,
        number,
        packed._pointer,
        w_scale.pointer,
        w_scale.stride,
        added.number,
        added.pointer or None,
        y_number,
        y.ctypes.data,
        packed.n,
    )
    if status:
        check(status)
    return y
