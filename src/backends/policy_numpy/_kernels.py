"""Products with quantized weights: in the native kernels where they were built, else in numpy.

Each operation has its plain reading in numpy here (`reference_…`). For int8 both give the same
bits; for float8 both keep within docs/numerics.md's bound.
"""

import weakref
from typing import Any

import numpy as np

import policy_kernels

from ._ops import Array, numpy_dtype
from ._quantize import quantize

MAX_CONTRACTION = 131_072
"""So many int8 products always fit an int32 sum; longer ones are added in float32."""

PACKING_NOTE = "the first call adds a packed copy of the codes, as large as they are"

KERNEL_FLOATS = ("float32", "bfloat16", "float16")
"""What the kernels read and write; other floats go through float32."""

OPERATIONS = ("linear_s8", "linear_s8w", "linear_f8", "linear_f8w")


def kernel_table() -> tuple[tuple[str, str, str], ...]:
    """Gives for each operation the kernel that runs, and what to know about it, for a LayerSpec."""
    native = policy_kernels.available()
    look_up = policy_kernels.kernel_name("dequantize_rows") if native else "dequantize_rows_numpy"
    rows = [("float", "numpy", ""), ("rows_s8", look_up, ""), ("rows_f8", look_up, "")]
    for operation in OPERATIONS:
        if policy_kernels.available():
            name = policy_kernels.kernel_name(operation)
            scalar = "smaller, not faster: the scalar kernel runs; "
            note = (scalar if name.endswith("scalar") else "") + PACKING_NOTE
        else:
            name = f"{operation}_numpy"
            note = f"smaller, not faster: no native kernels ({policy_kernels.build_info().reason})"
        rows.append((operation, name, note))
    return tuple(rows)


_packed: dict[int, tuple[weakref.ref[Array], policy_kernels.PackedWeight]] = {}


def packed_weight(codes: Array) -> policy_kernels.PackedWeight:
    """Gives a weight in the kernels' layout, made at the first call and kept while `codes` lives.

    From then on `codes` is read-only: a change would be seen by one of the two forms alone.

    Args:
        codes: int8 or a float8 dtype, of shape (n, k).
    """
    key = id(codes)
    found = _packed.get(key)
    if found is not None and found[0]() is codes:
        return found[1]
    packed = policy_kernels.pack(codes)
    codes.flags.writeable = False
    _packed[key] = weakref.ref(codes, lambda _: _packed.pop(key, None)), packed
    return packed


def packed_nbytes(codes: Array) -> int:
    """Gives what the packed copy of a weight's codes takes now; 0 before its first product."""
    found = _packed.get(id(codes))
    return found[1].nbytes if found is not None and found[0]() is codes else 0


def linear_s8(
    x: Array, codes: Array, scale: Array, bias: Array | None, dtype: str = "float32"
) -> Array:
    """Gives `x @ (codes * scale).T + bias` with the rows of `x` quantized on the way.

    Args:
        x: float32, bfloat16 or float16, of shape (m, k).
        codes: int8 of shape (n, k).
        scale: float32 of shape (n,).
        bias: One of these floats of shape (n,), or None.
        dtype: The result's: the name of one of these.

    Returns:
        Floats of shape (m, n). A row of `x` with a NaN or an infinity gives a row of NaN.
    """
    if policy_kernels.available():
        return policy_kernels.linear_s8(x, packed_weight(codes), scale, bias, dtype=dtype)
    return _narrowed(reference_linear_s8(_wide(x), codes, scale, as_bias(bias)), dtype)


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
    x: Array, codes: Array, scale: Array, bias: Array | None, dtype: str = "float32"
) -> Array:
    """Gives `(x @ codes.T) * scale + bias`; arguments and result as for `linear_s8`."""
    if policy_kernels.available():
        return policy_kernels.linear_s8w(x, packed_weight(codes), scale, bias, dtype=dtype)
    return _narrowed(reference_weight_only(_wide(x), codes, scale, as_bias(bias)), dtype)


def linear_f8w(
    x: Array, codes: Array, scale: Array, bias: Array | None, dtype: str = "float32"
) -> Array:
    """Gives `(x @ codes.T) * scale + bias` for codes of a float8 dtype; else as `linear_s8`."""
    if policy_kernels.available():
        return policy_kernels.linear_f8w(x, packed_weight(codes), scale, bias=bias, dtype=dtype)
    return _narrowed(reference_weight_only(_wide(x), codes, scale, as_bias(bias)), dtype)


def reference_weight_only(x: Array, codes: Array, scale: Array, bias: Array | None) -> Array:
    """`linear_s8w` and `linear_f8w` in numpy, summed in float64."""
    return _scaled(_product(x, codes), scale, bias)


def linear_f8(
    x_codes: Array,
    x_scale: Array,
    codes: Array,
    scale: Array,
    bias: Array | None,
    dtype: str = "float32",
    keep: bool = True,
) -> Array:
    """Gives `(x_codes @ codes.T) * (x_scale * scale) + bias`.

    Args:
        x_codes: A float8 dtype, of shape (m, k).
        x_scale: float32 of shape (m,), or () for one scale of the tensor.
        codes: A float8 dtype, of shape (n, k).
        scale: float32 of shape (n,), or ().
        bias: float32, bfloat16 or float16 of shape (n,), or None.
        dtype: The result's: the name of one of these.
        keep: Whether the packed codes are kept: not for those of a weight that is in training.

    Returns:
        Floats of shape (m, n).
    """
    if policy_kernels.available():
        weight = packed_weight(codes) if keep else policy_kernels.pack(codes)
        formats = x_codes.dtype.name, codes.dtype.name
        bits = x_codes.view(np.uint8)
        return policy_kernels.linear_f8(
            bits, x_scale, formats[0], weight, scale, formats[1], bias, dtype=dtype
        )
    y = reference_linear_f8(x_codes, x_scale, codes, scale, as_bias(bias))
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


def rows(codes: Array, scale: Array, ids: Array, dtype: str) -> Array:
    """Gives the dequantized rows of an embedding.

    Args:
        codes: Codes of shape (rows, width).
        scale: float32 of shape (rows, 1).
        ids: Integers of any shape, at least 0 and less than `rows`.
        dtype: The canonical dtype name of the result.
    """
    if policy_kernels.available() and dtype in KERNEL_FLOATS:
        chosen = np.asarray(ids, np.int64)
        return policy_kernels.dequantize_rows(codes, scale.reshape(-1), chosen, dtype)
    return reference_rows(codes, scale, ids, dtype)


def reference_rows(codes: Array, scale: Array, ids: Array, dtype: str) -> Array:
    """`rows` in numpy, to the same bits."""
    values: Array = codes[ids].astype(np.float32) * scale[ids]
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype))


def check_last_axis(x: Any, expected: int) -> None:
    """Raises ValueError unless the last axis of `x` has the expected size."""
    if np.ndim(x) == 0 or x.shape[-1] != expected:
        raise ValueError(
            f"Expected an input of shape (..., {expected}). Received shape {np.shape(x)}."
        )
