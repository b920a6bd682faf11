"""Small plain modules: TensorFlow without Keras has no layers of its own."""

from typing import Any

import tensorflow as tf

from policy_core._dtypes import shorten

from ._ops import Tensor


class Weight(tf.Module):
    """A weight of products in code of one's own, which a policy reaches as it reaches a layer.

    Args:
        value: Floats of shape (k, n), or a variable of them.
        name: The module's name.

    Attributes:
        weight: A variable of shape (k, n).
    """

    def __init__(self, value: Any, name: str | None = None) -> None:
        super().__init__(name)
        self.weight = value if isinstance(value, tf.Variable) else tf.Variable(value, name="weight")

    def __call__(self, x: Any, bias: Any = None) -> Tensor:
        """Gives `x @ weight + bias` for floats of shape (..., k)."""
        y = tf.tensordot(x, self.weight, 1)
        return y if bias is None else y + bias


def linear(x: Any, weight: Weight, bias: Any = None) -> Tensor:
    """Gives `x @ weight + bias`, under the weight's policy once it is wrapped.

    Args:
        x: Floats of shape (..., k).
        weight: A `Weight` of shape (k, n).
        bias: Floats of shape (n,), or None.

    Raises:
        TypeError: `weight` is no `Weight`: a plain variable has no place for a policy.
    """
    if not isinstance(weight, Weight):
        raise TypeError(f"Expected a policy_tensorflow.Weight. Received: {shorten(weight)}")
    return weight(x, bias)


class Linear(tf.Module):
    """`x @ weight + bias`.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        bias: Whether there is a bias.
        name: The module's name.

    Attributes:
        weight: A variable, float32 of shape (in_features, out_features).
        bias: A variable, float32 of shape (out_features,), or None.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, name: str | None = None
    ) -> None:
        super().__init__(name)
        # Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
        # networks", section 4.2.1.
        limit = (6 / max(in_features + out_features, 1)) ** 0.5
        start = tf.random.uniform((in_features, out_features), -limit, limit)
        self.weight = tf.Variable(start, name="weight")
        self.bias = tf.Variable(tf.zeros(out_features), name="bias") if bias else None

    def __call__(self, x: Any) -> Tensor:
        """Gives the product for floats of shape (..., in_features)."""
        y = tf.tensordot(x, self.weight, 1)
        return y if self.bias is None else y + self.bias


class Embedding(tf.Module):
    """Rows of a table.

    Args:
        rows: How many rows there are.
        width: Size of a row.
        name: The module's name.

    Attributes:
        weight: A variable, float32 of shape (rows, width).
    """

    def __init__(self, rows: int, width: int, name: str | None = None) -> None:
        super().__init__(name)
        self.weight = tf.Variable(tf.random.normal((rows, width), stddev=0.02), name="weight")

    def __call__(self, ids: Any) -> Tensor:
        """Gives the rows for integer ids of any shape."""
        return tf.gather(self.weight, ids)


class LayerNorm(tf.Module):
    """Normalizes the last axis to mean 0 and variance 1, then scales and shifts it.

    Args:
        width: Size of the last axis.
        epsilon: Added to the variance.
        name: The module's name.
    """

    def __init__(self, width: int, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name)
        self.epsilon = epsilon
        self.weight = tf.Variable(tf.ones(width), name="weight")
        self.bias = tf.Variable(tf.zeros(width), name="bias")

    def __call__(self, x: Any) -> Tensor:
        """Gives the normalized input."""
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + self.epsilon) * self.weight + self.bias
