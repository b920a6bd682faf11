"""Tensors to codes and scales and back, for every code dtype; the formulas are the core's."""

import tensorflow as tf

from policy_core import _scaling

from ._ops import OPS, Tensor
from ._plain import encode

BLOCK = 1 << 20
"""About how many elements are quantized at a time, so that no copies of a whole weight arise."""


def quantize(x: Tensor, dtype: str, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Gives the codes of a tensor and their scales, `x ≈ codes * scale`.

    Args:
        x: Floats of any dtype and shape.
        dtype: `"int8"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
        axes: The axes over which elements share a scale.

    Returns:
        Codes of `dtype` and the shape of `x`, and float32 scales in which `axes` have size 1:
        positive and finite, but NaN for a block that holds a NaN or an infinity.

    Raises:
        ValueError: `dtype` is none of these.
    """
    if dtype not in ("int8", "float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"Cannot quantize to {dtype!r}. Expected 'int8', 'float8_e4m3fn' or 'float8_e5m2'."
        )
    x = tf.convert_to_tensor(x)
    if not tf.executing_eagerly() or 0 in axes or x.shape.rank < 2 or tf.size(x) <= BLOCK:
        return _quantize_block(x, dtype, axes)
    rows = max(1, BLOCK // int(tf.size(x[0])))
    parts = [_quantize_block(x[i : i + rows], dtype, axes) for i in range(0, x.shape[0], rows)]
    codes, scales = zip(*parts, strict=True)
    return tf.concat(codes, 0), tf.concat(scales, 0)


def _quantize_block(x: Tensor, dtype: str, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if dtype == "int8":
        codes, scale = _scaling.quantize(OPS, x, dtype, axes)
        return codes, scale
    x = tf.cast(x, tf.float32)
    scale = _scaling.scale_of(OPS, OPS.amax(x, axes), dtype)
    return encode(x, scale, dtype), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: str = "float32") -> Tensor:
    """Gives `codes * scale`, computed in float32, in `dtype`."""
    return _scaling.dequantize(OPS, codes, scale, dtype)
