"""Casts of tensors to a compute dtype, and the way between tensors and numpy arrays."""

from typing import Any

import numpy as np
import tensorflow as tf

from policy_core import _casting
from policy_core._dtypes import DTYPES

from ._ops import TF_DTYPES, Tensor, dtype_name

KINDS = (tf.Tensor, tf.Variable, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
CASTABLE = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64})
_TARGETS = {
    name: TF_DTYPES[name]
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}


def convert_input(x: Any, dtype: str | None) -> Any:
    """Gives a tensor cast to `dtype` if it is a float of at least 16 bits, else itself.

    Args:
        x: A tensor; a ragged or sparse one, whose values are cast and whose structure stays; a
            variable, whose value is given where it must be cast; or a numpy array, which becomes a
            tensor.
        dtype: A canonical float dtype name, or None to cast nothing. Into a float8, which
            TensorFlow's cast overflows to NaN or infinity, values saturate.

    Raises:
        ValueError: `dtype` is a float format that no mode uses; TensorFlow has no such dtype.
    """
    if not isinstance(x, KINDS):
        x = from_numpy(np.asarray(x))
    if dtype is None:
        return x
    target = _TARGETS.get(dtype)
    if target is None:
        raise ValueError(f"Cannot cast to {dtype!r}. Expected one of {sorted(_TARGETS)}.")
    if x.dtype == target or x.dtype not in CASTABLE:
        return x
    if DTYPES[dtype].bits < 16:
        largest = DTYPES[dtype].max
        return tf.cast(tf.clip_by_value(tf.cast(x, tf.float32), -largest, largest), target)
    return tf.cast(x, target)


def cast_tensor(x: Tensor, dtype: tf.DType) -> Tensor:
    """Gives a float tensor of at least 16 bits in `dtype`; any other tensor as it is."""
    return tf.cast(x, dtype) if x.dtype != dtype and x.dtype in CASTABLE else x


def cast_nest(x: Any, dtype: tf.DType) -> Any:
    """Gives a nest with its float tensors, and numpy arrays, in `dtype`."""
    if isinstance(x, KINDS):
        return cast_tensor(x, dtype)
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, np.ndarray):
        return convert_input(x, dtype_name(dtype))
    if type(x) in (tuple, list):
        return type(x)([cast_nest(item, dtype) for item in x])
    if type(x) is dict:
        return {key: cast_nest(value, dtype) for key, value in x.items()}
    return _casting.convert(x, dtype_name(dtype), True)


def to_numpy(x: Tensor) -> Any:
    """Gives a tensor or variable as a numpy array, bit for bit (with ml_dtypes' dtypes)."""
    return np.asarray(x.numpy())


def from_numpy(x: Any) -> Tensor:
    """Gives a numpy array as a tensor, bit for bit.

    Raises:
        ValueError: TensorFlow has no such dtype.
    """
    name = x.dtype.name
    if name not in TF_DTYPES:
        raise ValueError(
            f"TensorFlow has no dtype {name!r}. Expected one of {sorted(TF_DTYPES)}; convert the "
            "array, or leave it out."
        )
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    # A copy: TensorFlow may share the array's memory, which its owner may write to.
    return tf.constant(np.array(x), TF_DTYPES[name])
