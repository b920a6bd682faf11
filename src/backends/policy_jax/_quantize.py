"""Arrays to codes and scales and back, for every code dtype; the formulas are the core's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from policy_core import _scaling
from policy_core._dtypes import DTYPES

from ._ops import OPS, Array, divide


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
    """
    if dtype not in ("int8", "float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"Cannot quantize to {dtype!r}. Expected 'int8', 'float8_e4m3fn' or 'float8_e5m2'."
        )
    return _quantize(x, dtype, tuple(axes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(x: Array, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
    if dtype == "int8":
        codes, scale = _scaling.quantize(OPS, x, dtype, axes)
        return codes, scale
    x = x.astype(jnp.float32)
    scale = _scaling.scale_of(OPS, OPS.amax(x, axes), dtype)
    return encode(x, scale, dtype), scale


def encode(x: Array, scale: Array, dtype: str) -> Array:
    """Gives the float8 codes of an array under a given scale; what is too large saturates.

    `policy_core._scaling.encode`, but divided as written also where XLA sees the scale's value,
    and where XLA takes subnormal numbers for zeros.
    """
    largest = DTYPES[dtype].max
    x = x.astype(jnp.float32)
    quotient = divide(x, scale)
    if dtype == "float8_e5m2":
        # Its range is wide enough to hold a subnormal float32 under the smallest scale.
        quotient = jnp.where(_is_subnormal(x), divide(_raised(x), scale * 2.0**100), quotient)
    return OPS.cast(OPS.clip(quotient, -largest, largest), dtype)


def _is_subnormal(x: Array) -> Array:
    return (jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7F800000) == 0


def _raised(x: Array) -> Array:
    """Gives `x * 2**100` for zeros and subnormal numbers, `mantissa * 2**-149`, from their bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = (bits & 0x007FFFFF).astype(jnp.float32) * 2.0**-49
    return jnp.where(bits >> 31 == 1, -magnitude, magnitude)


@functools.partial(jax.jit, static_argnums=2)
def dequantize(codes: Array, scale: Array, dtype: str = "float32") -> Array:
    """Gives `codes * scale`, computed in float32, in `dtype`."""
    return _scaling.dequantize(OPS, codes, scale, dtype)
