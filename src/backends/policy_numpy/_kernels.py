"""Products with quantized weights: in the native kernels where they were built, else in numpy.

Each operation has its plain reading in numpy here (`reference_…`). For int8 both give the same
bits; for float8 both keep within docs/numerics.md's bound.
"""

from typing import Any

import numpy as np

import policy_kernels

from ._ops import Array, numpy_dtype
from ._quantize import quantize

MAX_CONTRACTION = 131_072
"""So many int8 products always fit an int32 sum; longer ones are added in float32."""

KERNEL_FLOATS = ("float32", "bfloat16", "float16")
"""What the kernels read and write; other floats go through float32."""

Weight = Array | policy_kernels.PackedWeight
"""A weight's codes, as an array of shape (n, k) or in the kernels' layout."""

OPERATIONS = ("linear_s8", "linear_s8w", "linear_f8", "linear_f8w")


def kernel_table() -> tuple[tuple[str, str, str], ...]:
    """Gives for each operation the kernel that runs, and what to know about it, for a LayerSpec."""
    native = policy_kernels.available()
    look_up = policy_kernels.kernel_name("dequantize_rows") if native else "dequantize_rows_numpy"
    rows = [("float", "numpy", ""), ("rows_s8", look_up, ""), ("rows_f8", look_up, "")]
    for operation in OPERATIONS:
        if policy_kernels.available():
            name = policy_kernels.kernel_name(operation)
            note = "smaller, not faster: the scalar kernel runs" if name.endswith("scalar") else ""
        else:
            name = f"{operation}_numpy"
            note = f"smaller, not faster: no native kernels ({policy_kernels.build_info().reason})"
        rows.append((operation, name, note))
    return tuple(rows)


def stored(codes: Array) -> Weight:
    """Gives a weight's codes as a layer keeps them: packed, where there are kernels to read that.

    Args:
        codes: int8 or a float8 dtype, of shape (n, k).
    """
    return policy_kernels.pack(codes) if policy_kernels.available() else codes


def plain(weight: Weight) -> Array:
    """Gives a weight's codes as an array of shape (n, k), bit for bit."""
    if isinstance(weight, policy_kernels.PackedWeight):
        return weight.unpack().view(numpy_dtype(weight.dtype))
    return weight


def shape_of(weight: Weight) -> tuple[int, ...]:
    """Gives a weight's shape, packed or not."""
    if isinstance(weight, policy_kernels.PackedWeight):
        return (weight.n, weight.k)
    return weight.shape


def linear_s8(
    x: Array, codes: Weight, scale: Array, bias: Array | None, dtype: str = "float32"
) -> Array:
    """Gives `x @ (codes * scale).T + bias` with the rows of `x` quantized on the way.

    Args:
        x: float32, bfloat16 or float16, of shape (m, k).
        codes: int8 of shape (n, k), as an array or packed.
        scale: float32 of shape (n,).
        bias: One of these floats of shape (n,), or None.
        dtype: The result's: the name of one of these.

    Returns:
        Floats of shape (m, n). A row of `x` with a NaN or an infinity gives a row of NaN.
    """
    if policy_kernels.available():
        return policy_kernels.linear_s8(x, codes, scale, bias, dtype=dtype)
    return _narrowed(reference_linear_s8(_wide(x), plain(codes), scale, as_bias(bias)), dtype)


def reference_linear_s8(x: Array, codes: Array, scale: Array, bias: Array | None) -> Array:
    """`linear_s8` in numpy, to the same bits."""
    x_codes, x_scale = quantize(x, "int8", (1,))
    total = np.zeros((x.shape[0], codes.shape[0]), np.float32)
    for start in range(0, x.shape[1], MAX_CONTRACTION):
        part = slice(start, start + MAX_CONTRACTION)
        # Every partial sum is an integer below 2**53, so float64 products are exact, and BLAS
        # is a hundred times faster than numpy's loop over integers.
        exact = x_codes[:, part].astype(np.float64) @ codes[:, part].T.astype(np.float64)
        total += exact.astype(np.float32)
    return _scaled(total, x_scale * scale, bias)


def linear_s8w(
    x: Array, codes: Weight, scale: Array, bias: Array | None, dtype: str = "float32"
) -> Array:
    """Gives `(x @ codes.T) * scale + bias`; arguments and result as for `linear_s8`."""
    if policy_kernels.available():
        return policy_kernels.linear_s8w(x, codes, scale, bias, dtype=dtype)
    return _narrowed(reference_weight_only(_wide(x), plain(codes), scale, as_bias(bias)), dtype)


def linear_f8w(
    x: Array, codes: Weight, scale: Array, bias: Array | None, dtype: str = "float32"
) -> Array:
    """Gives `(x @ codes.T) * scale + bias` for codes of a float8 dtype; else as `linear_s8`."""
    if policy_kernels.available():
        return policy_kernels.linear_f8w(x, _packed(codes), scale, bias=bias, dtype=dtype)
    return _narrowed(reference_weight_only(_wide(x), plain(codes), scale, as_bias(bias)), dtype)


def reference_weight_only(x: Array, codes: Array, scale: Array, bias: Array | None) -> Array:
    """`linear_s8w` and `linear_f8w` in numpy, summed in float64."""
    return _scaled(_product(x, codes), scale, bias)


def linear_f8(
    x_codes: Array,
    x_scale: Array,
    codes: Weight,
    scale: Array,
    bias: Array | None,
    dtype: str = "float32",
) -> Array:
    """Gives `(x_codes @ codes.T) * (x_scale * scale) + bias`.

    Args:
        x_codes: A float8 dtype, of shape (m, k).
        x_scale: float32 of shape (m,), or () for one scale of the tensor.
        codes: A float8 dtype, of shape (n, k), as an array or packed.
        scale: float32 of shape (n,), or ().
        bias: float32, bfloat16 or float16 of shape (n,), or None.
        dtype: The result's: the name of one of these.

    Returns:
        Floats of shape (m, n).
    """
    if policy_kernels.available():
        weight = _packed(codes)
        return policy_kernels.linear_f8(
            x_codes.view(np.uint8),
            x_scale,
            x_codes.dtype.name,
            weight,
            scale,
            weight.dtype,
            bias,
            dtype=dtype,
        )
    y = reference_linear_f8(x_codes, x_scale, plain(codes), scale, as_bias(bias))
    return _narrowed(y, dtype)


def reference_linear_f8(
    x_codes: Array, x_scale: Array, codes: Array, scale: Array, bias: Array | None
) -> Array:
    """`linear_f8` in numpy, summed in float64."""
    rows = x_scale if x_scale.ndim == 0 else x_scale[:, None]
    return _scaled(_product(x_codes, codes), rows * scale, bias)


def product(x: Array, weight: Array) -> Array:
    """Gives `x @ weight.T` for floats: 16-bit ones are summed in float32 and rounded once."""
    if x.dtype.itemsize > 2 and weight.dtype.itemsize > 2:
        return x @ weight.T
    total: Array = x.astype(np.float32) @ weight.T.astype(np.float32)
    return total


def as_bias(bias: Array | None) -> Array | None:
    """Gives a bias in float32, in which it is added whatever the policy."""
    return None if bias is None else bias.astype(np.float32, copy=False)


def _packed(weight: Weight) -> policy_kernels.PackedWeight:
    if isinstance(weight, policy_kernels.PackedWeight):
        return weight
    return policy_kernels.pack(weight)


def _wide(x: Array) -> Array:
    return x.astype(np.float32, copy=False)


def _narrowed(y: Array, dtype: str) -> Array:
    # Overflow to infinity is what a cast to 16 bits means; it shows in the result.
    with np.errstate(over="ignore"):
        return y.astype(numpy_dtype(dtype), copy=False)


def _product(x: Array, codes: Array) -> Array:
    """Sums in float64 and rounds once: closer than any float32 sum can be."""
    with np.errstate(invalid="ignore"):
        exact: Array = x.astype(np.float64) @ codes.T.astype(np.float64)
    return exact.astype(np.float32)


def _scaled(total: Array, scale: Array, bias: Array | None) -> Array:
    """Scales, then adds the bias, each rounded to float32 by itself."""
    with np.errstate(invalid="ignore", over="ignore"):
        y: Array = total * scale
        return y if bias is None else y + bias


def rows(codes: Weight, scale: Array, ids: Array, dtype: str) -> Array:
    """Gives the dequantized rows of an embedding.

    Args:
        codes: Codes of shape (rows, width), as an array or packed.
        scale: float32 of shape (rows, 1).
        ids: Integers of any shape, at least 0 and less than `rows`.
        dtype: The canonical dtype name of the result.
    """
    if policy_kernels.available() and dtype in KERNEL_FLOATS:
        chosen = np.asarray(ids, np.int64)
        return policy_kernels.dequantize_rows(codes, scale.reshape(-1), chosen, dtype)
    return reference_rows(plain(codes), scale, ids, dtype)


def reference_rows(codes: Array, scale: Array, ids: Array, dtype: str) -> Array:
    """`rows` in numpy, to the same bits."""
    values: Array = codes[ids].astype(np.float32) * scale[ids]
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype))


def check_last_axis(x: Any, expected: int) -> None:
    """Raises ValueError unless the last axis of `x` has the expected size, TypeError if it is complex."""
    if np.iscomplexobj(x):
        raise TypeError(
            f"Expected real inputs: codes have no imaginary part. Received dtype {x.dtype}."
        )
    if np.ndim(x) == 0 or x.shape[-1] != expected:
        raise ValueError(
            f"Expected an input of shape (..., {expected}). Received shape {np.shape(x)}."
        )
