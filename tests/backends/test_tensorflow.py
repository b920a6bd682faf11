"""TensorFlow passes the contract."""

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

import policy_core as pc
import policy_tensorflow
from policy_core.testing import BackendContract


class Chain(tf.Module):
    """Layers one after the other, with their positions as names."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.length = len(layers)
        for i, layer in enumerate(layers):
            setattr(self, str(i), layer)

    def __call__(self, x: Any) -> Any:
        for i in range(self.length):
            x = getattr(self, str(i))(x)
        return x


class Rows(tf.Module):
    """A linear module of one's own, with a weight of shape (out, in)."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__()
        self.w = tf.Variable(weight)
        self.b = None if bias is None else tf.Variable(bias)

    def __call__(self, x: Any) -> Any:
        y = tf.tensordot(x, self.w, [[-1], [1]])
        return y if self.b is None else y + self.b


pc.register_layer(Rows, policy_tensorflow.LayerAdapter(kind="linear", weight="w", bias="b"))


class TestTensorFlow(BackendContract):
    """The modules of `policy_tensorflow`."""

    backend_name = "tensorflow"

    def linear(self, weight: Any, bias: Any) -> Any:
        layer = policy_tensorflow.Linear(1, 1, bias is not None)
        layer.weight = tf.Variable(weight.T)
        if bias is not None:
            layer.bias = tf.Variable(bias)
        return layer

    def embedding(self, table: Any) -> Any:
        layer = policy_tensorflow.Embedding(*table.shape)
        layer.weight.assign(table)
        return layer

    def norm(self, width: int) -> Any:
        return policy_tensorflow.LayerNorm(width)

    def sequential(self, layers: list[Any]) -> Any:
        return Chain(layers)

    def layers(self, model: Any) -> list[Any]:
        return [getattr(model, str(i)) for i in range(model.length)]

    def run(self, model: Any, x: Any, training: bool = False) -> Any:
        x = self.tensor(np.asarray(x))
        with policy_tensorflow.training() if training else contextlib.nullcontext():
            return self.array(model(x))


class TestOwnModules(TestTensorFlow):
    """Modules of one's own, registered: names and a layout of the weight that differ."""

    def linear(self, weight: Any, bias: Any) -> Any:
        return Rows(weight, bias)
