"""Products with codes, by XLA's own dots: int8 to the reference's bits, float8 within its bound.

They run on GPUs and TPUs, on sharded arrays, and where the native kernels were not built; `_native`
has the others. Every function takes `x` of shape (..., k) and weights of shape (n, k), and gives float32 of shape
(..., n). Leading axes are left as they are, so that a sharded batch stays sharded.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import policy_kernels

from . import _native, _packed
from ._ops import Array, numpy_dtype, rounded
from ._quantize import dequantize, quantize

Operand = tuple[Array, Array | None]
"""Codes with their scales, which broadcast to them; or floats, and None."""

MAX_CONTRACTION = 131_072
"""So many int8 products always fit an int32 sum; longer ones are added in float32."""

PRODUCTS = ("linear_s8", "linear_s8w", "linear_f8", "linear_f8w")


def kernel_table(device: str, against: str = "") -> tuple[tuple[str, str, str], ...]:
    """Gives for each operation the kernel that runs, and what to know about it, for a LayerSpec.

    Args:
        device: `"cpu"`, `"cuda"`, `"tpu"`, …
        against: Why the native kernels cannot multiply by the weight as it lies; `""` if they can.
    """
    rows = [("float", "xla", ""), ("rows_s8", "rows_s8_xla", ""), ("rows_f8", "rows_f8_xla", "")]
    for operation in PRODUCTS:
        name, note = f"{operation}_xla", ""
        if device == "cpu" and not against and _native.available():
            name = policy_kernels.kernel_name(operation)
            note = "smaller, not faster: the scalar kernel runs" if name.endswith("scalar") else ""
        elif device == "cpu":
            why = against or _native.reason_against()
            note = f"smaller, not faster: XLA's own dot runs ({why})"
        rows.append((operation, name, note))
    return tuple(rows)


def is_native(kernel: str) -> bool:
    """Says whether a plan's kernel is one of policy_kernels."""
    return not kernel.endswith("_xla")


def linear_s8(x: Array, codes: Array, scale: Array, bias: Array | None) -> Array:
    """Gives `x @ (codes * scale).T + bias` with the rows of `x` quantized on the way.

    Args:
        x: Floats of shape (..., k).
        codes: int8 of shape (n, k).
        scale: float32 of shape (n,).
        bias: Floats of shape (n,), or None.

    Returns:
        float32 of shape (..., n). A row of `x` with a NaN or an infinity gives a row of NaN.
    """
    x_codes, x_scale = quantize(x, "int8", (x.ndim - 1,))
    k = x.shape[-1]
    total = jnp.zeros((*x.shape[:-1], codes.shape[0]), jnp.float32)
    for start in range(0, k, MAX_CONTRACTION):
        part = slice(start, min(start + MAX_CONTRACTION, k))
        whole = k <= MAX_CONTRACTION
        left, right = (x_codes, codes) if whole else (x_codes[..., part], codes[:, part])
        exact = _sums(left, right).astype(jnp.float32)
        total = exact if whole else rounded(total + exact)
    return _scaled(total, x_scale, scale, bias)


@jax.custom_batching.custom_vmap
def _sums(x: Array, codes: Array) -> Array:
    """Gives the int32 sums of int8 products."""
    rows = math.prod(x.shape[:-1])
    if isinstance(rows, int) and rows != 1:
        return _contract(x, codes, jnp.int32)
    # One row, or who knows how many: an exported program is compiled for those that come.
    return jax.lax.platform_dependent(
        x, codes, cpu=_sums_of_one_row_more, default=lambda x, w: _contract(x, w, jnp.int32)
    )


@_sums.def_vmap
def _sums_of_batch(axis_size: int, in_batched: Any, x: Array, codes: Array) -> tuple[Array, bool]:
    if not in_batched[1]:
        return _sums(x, codes), True
    axes = tuple(0 if batched else None for batched in in_batched)
    return jax.vmap(lambda x, w: _contract(x, w, jnp.int32), axes)(x, codes), True


def _sums_of_one_row_more(x: Array, codes: Array) -> Array:
    # XLA's CPU multiplies a single row one code after the other, some 20 times slower than two.
    rows = math.prod(x.shape[:-1])
    padded = jnp.pad(x.reshape(rows, x.shape[-1]), ((0, 1), (0, 0)))
    return _contract(padded, codes, jnp.int32)[:rows].reshape(*x.shape[:-1], codes.shape[0])


def linear_weight_only(x: Array, codes: Array, scale: Array, bias: Array | None) -> Array:
    """Gives `(x @ codes.T) * scale + bias`, summed in float32; arguments as for `linear_s8`."""
    if x.dtype.itemsize == 2:
        # All codes are exact in 16 bits too, for which accelerators have their fastest products.
        total = jax.lax.platform_dependent(
            x, codes, cpu=_product_of_floats, default=_product_as_the_input
        )
    else:
        total = _product_of_floats(x, codes)
    return _scaled(total, None, scale, bias)


def linear_f8(
    x_codes: Array, x_scale: Array, codes: Array, scale: Array, bias: Array | None
) -> Array:
    """Gives `(x_codes @ codes.T) * (x_scale * scale) + bias`.

    Args:
        x_codes: A float8 dtype, of shape (..., k).
        x_scale: float32 of shape (..., 1), or () for one scale of the tensor.
        codes: A float8 dtype, of shape (n, k).
        scale: float32 of shape (n,), or ().
        bias: Floats of shape (n,), or None.
    """
    # Chosen when it is lowered, which may be for another platform than this process has.
    total = jax.lax.platform_dependent(
        x_codes, codes, cpu=_product_of_floats, cuda=_exact_float8, default=_float8
    )
    return _scaled(total, x_scale, scale, bias)


def gradient_product(
    native: bool, dtype: str, left: Operand, right: Operand, axes: tuple[Any, Any]
) -> Array:
    """Gives the product of two operands, summed over some axes of both, in float32.

    CPUs multiply the values in float32. Accelerators multiply float8 codes as they are where both
    operands have one scale, which then applies to the sum; else values rounded to `dtype`.

    Args:
        native: Whether it is known to run on a CPU.
        dtype: The compute dtype.
        left: The output gradient.
        right: What to multiply it by.
        axes: The axes of each to sum over, in the same order.
    """

    def of_values(left: Operand, right: Operand) -> Array:
        return _dot(_value(left), _value(right), axes, jax.lax.Precision.HIGHEST)

    def of_codes(left: Operand, right: Operand, precision: Any = None) -> Array:
        (codes, scale), (other_codes, other_scale) = left, right
        if scale is not None and other_scale is not None and scale.ndim == other_scale.ndim == 0:
            return _dot(codes, other_codes, axes, precision) * (scale * other_scale)
        narrow = numpy_dtype(dtype).itemsize == 2
        if not narrow:
            return of_values(left, right)
        return _dot(_value(left).astype(dtype), _value(right).astype(dtype), axes, None)

    if native:
        return of_values(left, right)
    exact = functools.partial(of_codes, precision=jax.lax.Precision.HIGHEST)
    return jax.lax.platform_dependent(left, right, cpu=of_values, cuda=exact, default=of_codes)


def _value(operand: Operand) -> Array:
    codes, scale = operand
    return codes.astype(jnp.float32) if scale is None else dequantize(codes, scale)


def _dot(x: Array, y: Array, axes: tuple[Any, Any], precision: Any) -> Array:
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), precision, preferred_element_type=jnp.float32
    )


def _product_of_floats(x: Array, codes: Array) -> Array:
    # Both formats are exact in float32, in which CPUs multiply fastest.
    return product(x.astype(jnp.float32), codes.astype(jnp.float32))


def _product_as_the_input(x: Array, codes: Array) -> Array:
    return _contract(x, codes.astype(x.dtype), jnp.float32)


def _float8(x: Array, codes: Array) -> Array:
    return _contract(x, codes, jnp.float32)


def _exact_float8(x: Array, codes: Array) -> Array:
    # By default XLA lets cuBLAS add float8 products with fewer bits than float32 has.
    return _contract(x, codes, jnp.float32, jax.lax.Precision.HIGHEST)


def product(x: Array, weight: Array) -> Array:
    """Gives `x @ weight.T`, summed in float32."""
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _contract(x: Array, codes: Array, dtype: Any, precision: Any = None) -> Array:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, codes, axes, precision, preferred_element_type=dtype)


def _scaled(total: Array, x_scale: Array | None, scale: Array, bias: Array | None) -> Array:
    """Scales, then adds the bias, each rounded to float32 by itself."""
    factor = scale if x_scale is None else rounded(x_scale * scale)
    y = rounded(total * factor)
    return y if bias is None else rounded(y + bias.astype(jnp.float32))


def rows(codes: Array, scale: Array, ids: Array, dtype: jnp.dtype) -> Array:
    """Gives the dequantized rows of an embedding.

    Args:
        codes: Codes of shape (rows, width).
        scale: float32 of shape (rows, 1).
        ids: Integers of any shape; one outside the table gives a row of NaN, as in `jnp.take`.
        dtype: The dtype of the result.
    """
    found = jnp.take(codes, _places(ids, codes.shape[0]), axis=0, mode="clip")
    return _scaled_rows(found, scale, ids, dtype)


def packed_rows(
    packed: Array, shape: tuple[int, int], codes: str, scale: Array, ids: Array, dtype: jnp.dtype
) -> Array:
    """Gives what `rows` gives, of a table of a shape and of a dtype of codes, packed."""
    found = _packed.packed_rows(packed, _places(ids, shape[0]), shape, codes)
    return _scaled_rows(found, scale, ids, dtype)


def _places(ids: Array, count: int) -> Array:
    """Gives ids counted from the front, as `jnp.take` counts negative ones, within the table."""
    return jnp.clip(jnp.where(ids < 0, ids + count, ids), 0, max(count - 1, 0))


def _scaled_rows(found: Array, scale: Array, ids: Array, dtype: jnp.dtype) -> Array:
    # An id outside the table has the scale NaN.
    by = jnp.take(scale, ids, axis=0, mode="fill")
    return rounded(found.astype(jnp.float32) * by).astype(dtype)
