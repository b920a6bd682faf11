"""Between float32 arrays and codes."""

import numpy as np
from numpy.typing import NDArray

from ._arrays import FLOAT32, UINT8, describe, flat, format_number, matrix
from ._loader import check, library


def quantize_rows_s8(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 codes and one scale per row, so that ``x ≈ codes * scale[:, None]``.

    Args:
        x: float32 (m, k).

    Returns:
        Codes, int8 (m, k) in [-127, 127], and scales, float32 (m,). A row that holds a NaN or an
        infinity has scale NaN and codes 0.

    Raises:
        TypeError: x is no float32 array.
        ValueError: x is not 2-D.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    values = matrix("x", x, FLOAT32, "(m, k)")
    m, k = values.array.shape
    codes = np.empty((m, k), np.int8)
    scale = np.empty(m, np.float32)
    check(
        native.pk_quantize_rows_s8(
            m, k, values.pointer, values.stride, codes.ctypes.data, k, scale.ctypes.data
        )
    )
    return codes, scale


def encode_f8(x: NDArray[np.float32], scale: float, format: str) -> NDArray[np.uint8]:
    """float8 codes of ``x / scale``, saturated at the largest finite value, rounded half to even.

    Args:
        x: float32, any shape.
        scale: greater than 0 and finite in float32; or NaN, which makes every code NaN.
        format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.

    Returns:
        The codes' bits, uint8, of x's shape. A NaN keeps its sign.

    Raises:
        TypeError: x is no float32 array, or scale no number.
        ValueError: the format is unknown, or the scale out of range.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    values = flat("x", x, FLOAT32)
    if not isinstance(scale, float | int | np.floating):
        raise TypeError(f"expected scale to be a float, got {describe(scale)}")
    number = format_number("format", format)
    codes = np.empty(values.shape, np.uint8)
    check(native.pk_encode_f8(number, values.size, values.ctypes.data, scale, codes.ctypes.data))
    return codes


def quantize_rows_f8(
    x: NDArray[np.float32], format: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """float8 codes and one scale per row, so that ``x ≈ decode_f8(codes) * scale[:, None]``.

    Args:
        x: float32 (m, k).
        format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.

    Returns:
        The codes' bits, uint8 (m, k), and scales, float32 (m,). A row that holds a NaN or an
        infinity has scale NaN and the positive NaN code throughout.

    Raises:
        TypeError: x is no float32 array.
        ValueError: x is not 2-D, or the format is unknown.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    values = matrix("x", x, FLOAT32, "(m, k)")
    number = format_number("format", format)
    m, k = values.array.shape
    codes = np.empty((m, k), np.uint8)
    scale = np.empty(m, np.float32)
    check(
        native.pk_quantize_rows_f8(
            number, m, k, values.pointer, values.stride, codes.ctypes.data, k, scale.ctypes.data
        )
    )
    return codes, scale


def decode_f8(codes: NDArray[np.uint8], format: str) -> NDArray[np.float32]:
    """The exact float32 value of each float8 code.

    Args:
        codes: bits of the codes, uint8, any shape.
        format: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.

    Returns:
        The values, float32, of the codes' shape.

    Raises:
        TypeError: codes is no uint8 array.
        ValueError: the format is unknown.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    bits = flat("codes", codes, UINT8)
    number = format_number("format", format)
    values = np.empty(bits.shape, np.float32)
    check(native.pk_decode_f8(number, bits.size, bits.ctypes.data, values.ctypes.data))
    return values
