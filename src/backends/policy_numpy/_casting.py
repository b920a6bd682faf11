"""Casts of numpy arrays to a compute dtype."""

from typing import Any

import numpy as np

from policy_core._dtypes import DTYPES

from ._ops import numpy_dtype

_CASTABLE = {numpy_dtype(name) for name in ("float16", "bfloat16", "float32", "float64")}
_TARGETS = {
    name: numpy_dtype(name)
    for name, dtype in DTYPES.items()
    if dtype.kind == "float" and (dtype.bits >= 16 or name in ("float8_e4m3fn", "float8_e5m2"))
}


def convert_input(x: Any, dtype: str | None) -> Any:
    """Gives an array cast to `dtype` if it is a float of at least 16 bits, else itself.

    Args:
        x: A numpy array or scalar of any dtype.
        dtype: A canonical float dtype name, or None to cast nothing. Into a float8, which many
            casts overflow to NaN, values saturate.

    Raises:
        ValueError: `dtype` is a float8 format that no mode uses.
    """
    target = None if dtype is None else _TARGETS.get(dtype)
    if dtype is None or x.dtype == target:
        return x
    if target is None:
        raise ValueError(f"Cannot cast to {dtype!r}. Expected one of {sorted(_TARGETS)}.")
    if x.dtype not in _CASTABLE:
        return x
    if DTYPES[dtype].bits < 16:
        largest = np.float32(DTYPES[dtype].max)
        x = np.clip(x.astype(np.float32), -largest, largest)
    elif target.itemsize < x.dtype.itemsize:
        # Overflow to infinity is what a cast to 16 bits means; it shows in the result.
        with np.errstate(over="ignore"):
            return x.astype(target)
    return x.astype(target)
