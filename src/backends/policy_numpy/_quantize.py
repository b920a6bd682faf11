"""Arrays to codes and scales and back, for every code dtype.

The formulas are the core's (`reference_…`); the native kernels, where they were built, give the same
bits for the cases that they have.
"""

from typing import Any

import numpy as np

import policy_kernels
from policy_core import _scaling

from ._ops import OPS, Array, numpy_dtype

BLOCK = 16_384
"""About how many elements are quantized at a time."""


def quantize(x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Gives the codes of an array and their scales, `x ≈ codes * scale`.

    Args:
        x: Floats of any dtype and shape.
        dtype: `"int8"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
        axes: The axes over which elements share a scale.

    Returns:
        Codes of `dtype` and the shape of `x`, and float32 scales in which `axes` have size 1:
        positive and finite, but NaN for a block that holds a NaN or an infinity.

    Raises:
        ValueError: `dtype` is none of these, or an axis is not there.

    >>> codes, scale = quantize(np.float32([[1, -2], [0, 0]]), "int8", (1,))
    >>> codes.tolist(), [float(s * 127) for s in scale.ravel()][0]
    ([[64, -127], [0, 0]], 2.0)
    """
    if dtype not in ("int8", "float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"Cannot quantize to {dtype!r}. Expected 'int8', 'float8_e4m3fn' or 'float8_e5m2'."
        )
    x = np.asarray(x)
    if policy_kernels.available() and x.ndim == 2 and axes == (1,):
        return _native_rows(x.astype(np.float32, copy=False), dtype)
    return reference_quantize(x, dtype, axes)


def _native_rows(x: Array, dtype: str) -> tuple[Array, Array]:
    if dtype == "int8":
        codes, scale = policy_kernels.quantize_rows_s8(x)
        return codes, scale[:, None]
    bits, scale = policy_kernels.quantize_rows_f8(x, dtype)
    return bits.view(numpy_dtype(dtype)), scale[:, None]


def reference_quantize(x: Array, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """`quantize` by the core's formulas alone, to the same bits."""
    if 0 in axes or x.ndim < 2:
        return _quantize_block(x, dtype, axes)
    # Blocks of rows: whole weights would need several float arrays of their size at once.
    rows = max(1, BLOCK // max(1, x[:1].size))
    blocks = [_quantize_block(x[i : i + rows], dtype, axes) for i in range(0, len(x) or 1, rows)]
    codes, scales = zip(*blocks, strict=True)
    return np.concatenate(codes), np.concatenate(scales)


def _quantize_block(x: Array, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
    with np.errstate(invalid="ignore", over="ignore"):
        codes, scale = _scaling.quantize(OPS, x, dtype, axes)
    return codes, scale


def dequantize(codes: Array, scale: Any, dtype: str = "float32") -> Array:
    """Gives `codes * scale`, computed in float32, in `dtype`."""
    result: Array = _scaling.dequantize(OPS, codes, scale, dtype)
    return result


def encode(x: Any, scale: Any, dtype: str) -> Array:
    """Gives the float8 codes of an array under a given scale; what is too large saturates.

    Args:
        x: Floats of any dtype and shape.
        scale: float32, one for all or to broadcast; positive and finite, or NaN.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
    """
    if policy_kernels.available() and np.ndim(scale) == 0:
        wide = np.asarray(x).astype(np.float32, copy=False)
        return policy_kernels.encode_f8(wide, float(scale), dtype).view(numpy_dtype(dtype))
    return reference_encode(x, scale, dtype)


def reference_encode(x: Any, scale: Any, dtype: str) -> Array:
    """`encode` by the core's formula alone, to the same bits."""
    with np.errstate(invalid="ignore", over="ignore"):
        codes: Array = _scaling.encode(OPS, x, scale, dtype)
    return codes
