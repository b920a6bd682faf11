"""Arrays to codes and scales and back, for every code dtype; the formulas are the core's."""

from typing import Any

import numpy as np

from policy_core import _scaling

from ._ops import OPS, Array

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
    """Gives the float8 codes of an array under a given scale; what is too large saturates."""
    with np.errstate(invalid="ignore", over="ignore"):
        codes: Array = _scaling.encode(OPS, x, scale, dtype)
    return codes
