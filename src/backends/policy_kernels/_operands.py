"""What the products of `_linear` are given, checked and as the native library takes it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import (
    INT8,
    UINT8,
    Vector,
    bias_vector,
    float_dtype,
    float_number,
    matrix,
    scales,
)
from ._packed import PackedWeight

Scale = float | np.float32 | NDArray[np.float32]
Floats = NDArray[Any]
Weight = PackedWeight | NDArray[Any]

NO_BIAS = Vector(None, np.empty(0, np.float32), 0, 1, 0)


def packed_weight(name: str, value: object, kind: str) -> PackedWeight:
    """Gives a weight that holds codes of a kind, packed if it is not."""
    if isinstance(value, PackedWeight):
        if value.dtype != kind:
            raise TypeError(f"expected {name} to hold {kind} codes, got {value!r}")
        return value
    wanted = INT8 if kind == "int8" else UINT8
    return PackedWeight(matrix(name, value, wanted, "(n, k)").array, kind)


def weight_scales(weight: PackedWeight, name: str, value: object, *, for_all: bool) -> Vector:
    """Gives the scales of a weight's channels, or one of all of them."""
    # Looking up an array's address costs as much as the rest of a small call: the latest is kept.
    found = weight._vectors.get("scale")
    if found is None or found.given is not value:
        found = scales(name, value, weight.n, for_all=for_all)
        weight._vectors["scale"] = found
    return found


def channel_bias(weight: PackedWeight, value: object) -> Vector:
    """Gives a bias for each channel of a weight."""
    if value is None:
        return NO_BIAS
    found = weight._vectors.get("bias")
    if found is None or found.given is not value:
        found = bias_vector("bias", value, weight.n)
        weight._vectors["bias"] = found
    return found


def empty_result(m: int, n: int, dtype: object, default: np.dtype[Any]) -> tuple[Floats, int]:
    """Gives the array that a product fills, and the number of its dtype."""
    kind = default if dtype is None else float_dtype("dtype", dtype)
    number = float_number(kind)
    assert number is not None
    return np.empty((m, n), kind), number


def check_k(name: str, value: object, weight: PackedWeight) -> None:
    """Checks, before anything is copied, that rows fit a weight."""
    if isinstance(value, np.ndarray) and (value.ndim != 2 or value.shape[1] != weight.k):
        raise ValueError(
            f"expected {name} to have shape (m, k) with k={weight.k}, got {value.shape!r}"
        )
