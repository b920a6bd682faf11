"""Products of rows with quantized weights.

Weights are (n, k): one row per output channel. Results are float32 (m, n). 2-D arguments may have any
strides; a copy is made only where rows are not contiguous or overlap.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import (
    FLOAT32,
    INT8,
    UINT8,
    Matrix,
    format_number,
    matrix,
    scales,
    vector,
)
from ._loader import check, library

Scale = float | np.float32 | NDArray[np.float32]


def _bias(bias: NDArray[np.float32] | None, n: int) -> NDArray[Any] | None:
    return None if bias is None else vector("bias", bias, n)


def _pointer(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def linear_s8(
    x: NDArray[np.float32],
    codes: NDArray[np.int8],
    scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``x @ (codes * scale[:, None]).T + bias`` with the rows of x quantized to int8 on the way.

    The sum of code products is exact; scales and bias are applied in float32, each operation rounded
    by itself.

    Args:
        x: float32 (m, k). A row that holds a NaN or an infinity gives a row of NaN.
        codes: int8 (n, k).
        scale: float32 (n,).
        bias: float32 (n,), or None.

    Returns:
        float32 (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape.
        MemoryError: there is no memory for 8 rows of codes.
        KernelsUnavailableError: the library was not built.
    """
    return _linear_s8(library().pk_linear_s8, x, codes, scale, bias)


def linear_s8w(
    x: NDArray[np.float32],
    codes: NDArray[np.int8],
    scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``(x @ codes.T) * scale + bias``: only the weights are quantized.

    Args:
        x: float32 (m, k).
        codes: int8 (n, k).
        scale: float32 (n,).
        bias: float32 (n,), or None.

    Returns:
        float32 (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape.
        KernelsUnavailableError: the library was not built.
    """
    return _linear_s8(library().pk_linear_s8w, x, codes, scale, bias)


def _linear_s8(
    function: Any,
    x: NDArray[np.float32],
    codes: NDArray[np.int8],
    scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    rows = matrix("x", x, FLOAT32, "(m, k)")
    m, k = rows.array.shape
    weights = matrix("codes", codes, INT8, "(n, k)", k)
    n = weights.array.shape[0]
    w_scale = vector("scale", scale, n)
    added = _bias(bias, n)
    y = np.empty((m, n), np.float32)
    check(
        function(
            m,
            n,
            k,
            rows.pointer,
            rows.stride,
            weights.pointer,
            weights.stride,
            w_scale.ctypes.data,
            _pointer(added),
            y.ctypes.data,
            n,
        )
    )
    return y


def linear_s8_codes(
    x_codes: NDArray[np.int8],
    x_scale: NDArray[np.float32],
    w_codes: NDArray[np.int8],
    w_scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``linear_s8`` for rows that are quantized already.

    Args:
        x_codes: int8 (m, k).
        x_scale: float32 (m,). A NaN gives a row of NaN.
        w_codes: int8 (n, k).
        w_scale: float32 (n,).
        bias: float32 (n,), or None.

    Returns:
        float32 (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    rows = matrix("x_codes", x_codes, INT8, "(m, k)")
    m, k = rows.array.shape
    row_scale = vector("x_scale", x_scale, m)
    weights = matrix("w_codes", w_codes, INT8, "(n, k)", k)
    n = weights.array.shape[0]
    channel_scale = vector("w_scale", w_scale, n)
    added = _bias(bias, n)
    y = np.empty((m, n), np.float32)
    check(
        native.pk_linear_s8_codes(
            m,
            n,
            k,
            rows.pointer,
            rows.stride,
            row_scale.ctypes.data,
            weights.pointer,
            weights.stride,
            channel_scale.ctypes.data,
            _pointer(added),
            y.ctypes.data,
            n,
        )
    )
    return y


def linear_f8(
    x_codes: NDArray[np.uint8],
    x_scale: Scale,
    x_format: str,
    w_codes: NDArray[np.uint8],
    w_scale: Scale,
    w_format: str,
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``(x @ w.T) * (x_scale * w_scale) + bias`` of float8 codes.

    Args:
        x_codes: bits of the codes, uint8 (m, k).
        x_scale: float32 (m,), or a float or float32 () for all rows.
        x_format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        w_codes: bits of the codes, uint8 (n, k).
        w_scale: float32 (n,), or a float or float32 () for all channels.
        w_format: as x_format.
        bias: float32 (n,), or None.

    Returns:
        float32 (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, or a format is unknown.
        MemoryError: there is no memory for 9 decoded rows.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    rows = matrix("x_codes", x_codes, UINT8, "(m, k)")
    m, k = rows.array.shape
    row_scale, row_scale_stride = scales("x_scale", x_scale, m)
    x_number = format_number("x_format", x_format)
    weights, channel_scale, channel_scale_stride, w_number = _weights_f8(
        "w_codes", w_codes, k, "w_scale", w_scale, "w_format", w_format
    )
    n = weights.array.shape[0]
    added = _bias(bias, n)
    y = np.empty((m, n), np.float32)
    check(
        native.pk_linear_f8(
            m,
            n,
            k,
            x_number,
            rows.pointer,
            rows.stride,
            row_scale.ctypes.data,
            row_scale_stride,
            w_number,
            weights.pointer,
            weights.stride,
            channel_scale.ctypes.data,
            channel_scale_stride,
            _pointer(added),
            y.ctypes.data,
            n,
        )
    )
    return y


def linear_f8w(
    x: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scale: Scale,
    format: str,
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """``(x @ decode_f8(codes, format).T) * scale + bias``: only the weights are quantized.

    Args:
        x: float32 (m, k).
        codes: bits of the codes, uint8 (n, k).
        scale: float32 (n,), or a float or float32 () for all channels.
        format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        bias: float32 (n,), or None.

    Returns:
        float32 (m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, or the format is unknown.
        MemoryError: there is no memory for a decoded row.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    rows = matrix("x", x, FLOAT32, "(m, k)")
    m, k = rows.array.shape
    weights, w_scale, w_scale_stride, number = _weights_f8(
        "codes", codes, k, "scale", scale, "format", format
    )
    n = weights.array.shape[0]
    added = _bias(bias, n)
    y = np.empty((m, n), np.float32)
    check(
        native.pk_linear_f8w(
            m,
            n,
            k,
            rows.pointer,
            rows.stride,
            number,
            weights.pointer,
            weights.stride,
            w_scale.ctypes.data,
            w_scale_stride,
            _pointer(added),
            y.ctypes.data,
            n,
        )
    )
    return y


def _weights_f8(
    codes_name: str,
    codes: object,
    k: int,
    scale_name: str,
    scale: object,
    format_name: str,
    format: str,
) -> tuple[Matrix, NDArray[Any], int, int]:
    weights = matrix(codes_name, codes, UINT8, "(n, k)", k)
    values, stride = scales(scale_name, scale, weights.array.shape[0])
    return weights, values, stride, format_number(format_name, format)
