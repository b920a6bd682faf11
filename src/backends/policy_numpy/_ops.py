"""The array functions of `policy_core._scaling.Ops`, in numpy."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """Gives numpy's dtype of a canonical name, ml_dtypes' where numpy has none of its own."""
    return np.dtype(getattr(ml_dtypes, name, name))


class NumpyOps:
    """numpy's side of `Ops`; the protocol says what each function gives."""

    def cast(self, x: Any, dtype: str) -> Any:
        return np.asarray(x).astype(numpy_dtype(dtype), copy=False)

    def amax(self, x: Any, axes: tuple[int, ...]) -> Any:
        return np.max(np.abs(x), axis=axes, keepdims=True, initial=0.0)

    def maximum(self, x: Any, y: Any) -> Any:
        return np.maximum(x, y)

    def clip(self, x: Any, low: float, high: float) -> Any:
        return np.clip(x, np.float32(low), np.float32(high))

    def rint(self, x: Any) -> Any:
        return np.rint(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return np.where(condition, x, y).astype(np.float32, copy=False)

    def isfinite(self, x: Any) -> Any:
        return np.isfinite(x)

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        return np.full(shape, value, np.float32)

    def prepend(self, first: Any, rest: Any) -> Any:
        return np.concatenate([np.reshape(first, (1,)), rest[:-1]])


OPS = NumpyOps()
