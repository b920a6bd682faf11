"""The array functions of `policy_core._scaling.Ops`, in TensorFlow, and its dtypes by name.

Graphs are rewritten before they run, by Grappler and again by XLA: `x / constant` into
`x * (1 / constant)`, `(x * a) * b` into `x * (a * b)`, `x * a + b` into one fused operation. Each
rounds differently from the operations as they are written. `rounded` and `divide` keep them as
they are.
"""

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

Tensor = Any
"""A tf.Tensor, eager or of a graph, or what TensorFlow takes for one."""

_FLOAT8 = {name: getattr(tf.dtypes.experimental, name) for name in ("float8_e4m3fn", "float8_e5m2")}
TF_DTYPES: dict[str, tf.DType] = {
    **{
        name: getattr(tf, name)
        for name in (
            *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
            *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        )
    },
    **_FLOAT8,
}


def dtype_name(dtype: tf.DType) -> str:
    """Gives the canonical name of a TensorFlow dtype."""
    name: str = dtype.name.removesuffix("_ref")
    return name


def with_shape(x: Tensor, shape: tf.TensorShape) -> Tensor:
    """Gives a tensor of which a graph knows a shape, as far as it is given."""
    return x if shape.rank is None else tf.ensure_shape(x, shape)


def in_xla() -> bool:
    """Says whether what is being traced will be compiled by XLA (`jit_compile=True`, TPUs)."""
    if tf.executing_eagerly():
        return False
    # The question that TensorFlow's own control flow asks; there is no public one.
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def rounded(x: Tensor) -> Tensor:
    """Gives floats as they are, but as a value of their own: no user is fused with them.

    A selection stays, because nobody may know that both sides are equal.
    """
    if tf.executing_eagerly():
        return x
    return tf.where(x == x, x, tf.constant(np.nan, x.dtype))


def divide(x: Tensor, y: Tensor) -> Tensor:
    """Gives `x / y`, really divided, and rounded by itself."""
    if tf.executing_eagerly():
        return x / y
    # A divisor that depends on x is no constant whose reciprocal could be taken beforehand.
    return rounded(x / tf.where(x == x, y, tf.constant(np.nan, x.dtype)))


class Constant:
    """A float32 number that divides and is divided as written, also where a graph has its value."""

    def __init__(self, value: float) -> None:
        self.value = np.float32(value)

    def __truediv__(self, x: Tensor) -> Tensor:
        return rounded(self.value / x)

    def __rtruediv__(self, x: Tensor) -> Tensor:
        return divide(x, self.value)


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, Constant) else x


class TfOps:
    """TensorFlow's side of `Ops`; the protocol says what each function gives."""

    def cast(self, x: Any, dtype: str) -> Any:
        return tf.cast(x, TF_DTYPES[dtype])

    def amax(self, x: Any, axes: tuple[int, ...]) -> Any:
        largest = tf.reduce_max(tf.abs(x), axes, keepdims=True)
        if in_xla():
            # XLA's maximum on a CPU passes over NaN.
            bad = tf.reduce_any(tf.math.is_nan(x), axes, keepdims=True)
            largest = tf.where(bad, tf.constant(np.nan, largest.dtype), largest)
        # The maximum of nothing is -infinity.
        return tf.maximum(largest, tf.zeros((), largest.dtype))

    def maximum(self, x: Any, y: Any) -> Any:
        return tf.maximum(_plain(x), _plain(y))

    def clip(self, x: Any, low: float, high: float) -> Any:
        return tf.clip_by_value(x, low, high)

    def rint(self, x: Any) -> Any:
        return tf.round(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return tf.where(condition, _float32(x), _float32(y))

    def isfinite(self, x: Any) -> Any:
        return tf.math.is_finite(x)

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        return tf.fill(shape, np.float32(value)) if shape else Constant(value)

    def prepend(self, first: Any, rest: Any) -> Any:
        return tf.concat([tf.reshape(first, (1,)), rest[:-1]], 0)


def _float32(x: Any) -> Any:
    x = _plain(x)
    return np.float32(x) if isinstance(x, float) else x


OPS = TfOps()
