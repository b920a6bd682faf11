"""Casts of symbolic tensors and variables; tensors belong to the framework that Keras runs on."""

from typing import Any

import keras

from policy_core._dtypes import DTYPES, is_castable_float

from ._keras import KerasTensor, KerasVariable, raw
from ._kernels import FRAMEWORK


def convert_input(x: Any, dtype: str | None) -> Any:
    """Gives a tensor cast to `dtype` if it is a float of at least 16 bits, else itself.

    Args:
        x: A KerasTensor, a `keras.Variable`, whose value is given if it must be cast, a numpy
            array or a tensor of the framework.
        dtype: A canonical float dtype name, or None to cast nothing.

    Raises:
        ValueError: The framework has no such dtype.
    """
    if not isinstance(x, (KerasTensor, KerasVariable)):
        return FRAMEWORK.convert_input(x, dtype)
    if dtype is None:
        return x
    if dtype not in DTYPES or DTYPES[dtype].kind != "float":
        raise ValueError(f"Cannot cast to {dtype!r}. Expected the name of a float dtype.")
    own = x._dtype if isinstance(x, KerasVariable) else x.dtype
    if own == dtype or not is_castable_float(own):
        return x
    if isinstance(x, KerasVariable):
        return FRAMEWORK.convert_input(raw(x), dtype)
    return keras.ops.cast(x, dtype)


def to_numpy(x: Any) -> Any:
    """Gives a tensor or variable as a numpy array, bit for bit."""
    return FRAMEWORK.to_numpy(raw(x) if isinstance(x, KerasVariable) else x)
