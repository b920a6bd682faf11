"""Stacks of products, each with a weight of its own."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import CODES, FORMATS, describe, float_dtype, float_number
from ._loader import check, library
from ._packed import PackedWeight

OPERATIONS = {
    "linear_s8": 0,
    "linear_s8_codes": 1,
    "linear_s8w": 2,
    "linear_f8": 3,
    "linear_f8w": 4,
}
_ON_CODES = ("linear_s8_codes", "linear_f8")


class _Steps(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("x", "x_scale", "w_scale", "bias", "y")]


def linear_batched(
    operation: str,
    x: NDArray[Any],
    weights: Sequence[PackedWeight],
    scale: NDArray[np.float32],
    bias: NDArray[Any] | None = None,
    *,
    x_scale: NDArray[np.float32] | None = None,
    dtype: object = None,
) -> NDArray[Any]:
    """A product for each of a stack of weights, side by side.

    Args:
        operation: ``"linear_s8"``, ``"linear_s8_codes"``, ``"linear_s8w"``, ``"linear_f8"`` or
            ``"linear_f8w"``: what each of them is.
        x: (count, m, k): float32, bfloat16 or float16; int8 for ``linear_s8_codes``; a float8 dtype
            for ``linear_f8``.
        weights: `count` packed weights of one kind and size (n, k).
        scale: float32 (count, n).
        bias: float32, bfloat16 or float16 (count, n), or None.
        x_scale: float32 (count, m), for ``linear_s8_codes`` and ``linear_f8`` alone.
        dtype: the result's dtype or its name; None for x's, or float32 where x is codes.

    Returns:
        Floats (count, m, n).

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: an argument has another shape, the weights differ, or there is no such operation.
        MemoryError: there is no memory for a block of rows.
        KernelsUnavailableError: the library was not built.
    """
    native = library()
    if operation not in OPERATIONS:
        raise ValueError(
            f"expected operation to be one of {', '.join(OPERATIONS)}, got {operation!r}"
        )
    on_codes = operation in _ON_CODES
    rows = _stack("x", x, 3)
    x_type = CODES.get(rows.dtype.name) if on_codes else float_number(rows.dtype)
    fits = (rows.dtype == np.int8) is (operation == "linear_s8_codes") if on_codes else True
    if x_type is None or not fits:
        raise TypeError(f"expected x of a dtype that {operation} takes, got {describe(x)}")
    code = _one_kind(weights, operation)
    count, m, k = rows.shape
    n = weights[0].n if weights else 0
    if len(weights) != count or any(weight.k != k for weight in weights):
        raise ValueError(
            f"expected one weight of k={k} for each of {count} stacked x, got {len(weights)} "
            f"of k={[weight.k for weight in weights]}"
        )
    factors = _of_shape("scale", scale, (count, n))
    x_factors = _of_shape("x_scale", x_scale, (count, m)) if on_codes else None
    if not on_codes and x_scale is not None:
        raise TypeError(f"{operation} takes no x_scale, got {describe(x_scale)}")
    added = None if bias is None else _of_shape("bias", bias, (count, n), any_float=True)
    default = np.dtype(np.float32) if on_codes else rows.dtype
    target = default if dtype is None else float_dtype("dtype", dtype)
    y = np.empty((count, m, n), target)
    pointers = (ctypes.c_void_p * count)(*(weight._pointer for weight in weights))
    steps = _Steps(m * k, m, n, n, m * n)
    check(
        native.pk_linear_batched(
            None,
            OPERATIONS[operation],
            count,
            ctypes.addressof(steps),
            m,
            n,
            k,
            x_type,
            rows.ctypes.data,
            k,
            None if x_factors is None else x_factors.ctypes.data,
            1,
            code,
            ctypes.addressof(pointers),
            factors.ctypes.data,
            1,
            0 if added is None else float_number(added.dtype),
            None if added is None else added.ctypes.data,
            float_number(target),
            y.ctypes.data,
            n,
        )
    )
    return y


def _one_kind(weights: Sequence[PackedWeight], operation: str) -> int:
    wanted = FORMATS if operation.startswith("linear_f8") else {"int8": CODES["int8"]}
    kinds = {(weight.dtype, weight.n) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"expected weights of one dtype and size, got {list(weights)!r}")
    kind = next(iter(kinds))[0] if kinds else next(iter(wanted))
    if kind not in wanted:
        raise TypeError(f"expected weights of {' or '.join(wanted)} codes, got {weights[0]!r}")
    return CODES[kind]


def _stack(name: str, value: object, ndim: int) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected {name} to be a numpy array, got {describe(value)}")
    if value.ndim != ndim:
        raise ValueError(f"expected {name} to have {ndim} axes, got shape {value.shape!r}")
    return np.require(value, requirements=["C", "A"])


def _of_shape(
    name: str, value: object, shape: tuple[int, ...], any_float: bool = False
) -> NDArray[Any]:
    array = _stack(name, value, len(shape))
    usable = float_number(array.dtype) is not None if any_float else array.dtype == np.float32
    if not usable:
        raise TypeError(f"expected {name} of dtype float32, got {describe(value)}")
    if array.shape != shape:
        raise ValueError(f"expected {name} to have shape {shape!r}, got {array.shape!r}")
    return array
