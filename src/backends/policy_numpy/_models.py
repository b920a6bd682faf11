"""Small plain layers, the stand-in for a framework: numpy has no layers of its own."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from policy_core import DTypePolicy
from policy_core._backend import Wrapping
from policy_core._plan import LayerKind, TensorSpec

from . import _kernels, _layers
from ._ops import Array


class Layer:
    """A layer, or a model made of layers.

    A leaf keeps its arrays in `tensors` and defines `compute`. A composite holds other layers as
    attributes (or in lists, tuples or dicts that are attributes) and defines `__call__`.
    """

    kind: ClassVar[LayerKind] = "other"

    def __init__(self) -> None:
        self.tensors: dict[str, Array] = {}
        self.wrapping: Wrapping | None = None
        self.plain_specs: tuple[TensorSpec, ...] = ()

    def __call__(self, x: Any, training: bool = False) -> Any:
        """Gives the layer's output, under its policy once it is wrapped.

        Args:
            x: The input; its float arrays are cast to the policy's compute dtype.
            training: Whether delayed-scaling state is updated.
        """
        return _layers.call(self, x, training)

    def compute(self, x: Array, tensors: dict[str, Array]) -> Array:
        """Gives the float output for an input and the tensors as they shall be read."""
        raise TypeError(f"{type(self).__name__} defines neither compute nor __call__.")

    def finish(self, y: Array) -> Array:
        """Gives what follows a layer's product: its activation."""
        return y

    def children(self) -> Iterator[tuple[str, "Layer"]]:
        """Gives the layers directly inside, with their names."""
        for name, value in vars(self).items():
            yield from _layers_in(name, value)

    def flatten(self, path: str = "") -> Iterator[tuple[str, "Layer"]]:
        """Gives every leaf layer inside with its path; a leaf gives itself.

        Raises:
            TypeError: A layer holds both layers and tensors, or defines `__call__` without layers.
        """
        inside = list(self.children())
        # What is refused here would never be reached by a policy, or not be saved.
        if inside and self.tensors:
            raise TypeError(
                f"{type(self).__name__} at {path!r} holds layers and tensors of its own. Put the "
                "tensors into a layer that defines compute()."
            )
        if not inside and type(self).__call__ is Layer.__call__:
            yield path, self
        elif not inside and not isinstance(self, Sequential):
            raise TypeError(
                f"{type(self).__name__} at {path!r} defines __call__ but holds no layers. Define "
                "compute() instead, so that its policy can act."
            )
        for name, child in inside:
            yield from child.flatten(f"{path}/{name}" if path else name)

    @property
    def dtype_policy(self) -> DTypePolicy | None:
        """The layer's policy; None for a layer that was not wrapped, and for a composite."""
        return None if self.wrapping is None else self.wrapping.plan.policy

    def _arguments(self) -> str:
        return ""

    def __repr__(self) -> str:
        if children := list(self.children()):
            lines = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in children]
            return "\n  ".join([f"{type(self).__name__}(", *lines]) + "\n)"
        policy = "" if self.dtype_policy is None else f", dtype_policy={self.dtype_policy!r}"
        return f"{type(self).__name__}({(self._arguments() + policy).removeprefix(', ')})"


def _layers_in(name: str, value: Any) -> Iterator[tuple[str, Layer]]:
    if isinstance(value, Layer):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _layers_in(f"{name}/{index}", item)
    elif isinstance(value, dict) and name != "tensors":
        for key, item in value.items():
            yield from _layers_in(f"{name}/{key}", item)


def _relu(y: Array) -> Array:
    result: Array = np.maximum(y, y.dtype.type(0))
    return result


def _tanh(y: Array) -> Array:
    return np.tanh(y.astype(np.float32)).astype(y.dtype)


def _gelu(y: Array) -> Array:
    # The tanh form; Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2.
    z = y.astype(np.float32)
    inner = np.float32(0.7978845608) * (z + np.float32(0.044715) * z * z * z)
    result: Array = np.float32(0.5) * z * (1 + np.tanh(inner))
    return result.astype(y.dtype)


ACTIVATIONS = {"relu": _relu, "tanh": _tanh, "gelu": _gelu}


class Dense(Layer):
    """`activation(x @ weight.T + bias)`.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        bias: Whether there is a bias.
        activation: `"relu"`, `"tanh"`, `"gelu"` or None.
        seed: For the weight, which is drawn from a normal distribution of variance
            `2 / in_features`; None for a new one each time.

    Raises:
        ValueError: A size is negative, or there is no such activation.
    """

    kind = "linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(
                f"Unknown activation {activation!r}. Expected None or one of {list(ACTIVATIONS)}."
            )
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.tensors["weight"] = _random((out_features, in_features), in_features, seed)
        if bias:
            self.tensors["bias"] = np.zeros(out_features, np.float32)

    @property
    def weight(self) -> Array:
        """The float weight of shape (out_features, in_features), dequantized if need be."""
        return _layers.float_tensor(self, "weight")

    @property
    def bias(self) -> Array | None:
        """The bias of shape (out_features,), or None."""
        return self.tensors.get("bias")

    def compute(self, x: Array, tensors: dict[str, Array]) -> Array:
        """Gives the float output for an input and the tensors as they shall be read."""
        _kernels.check_last_axis(x, self.in_features)
        y = _kernels.product(x, tensors["weight"])
        if "bias" in tensors:
            y = y + tensors["bias"].astype(y.dtype, copy=False)
        narrow = x.dtype.itemsize == 2 and tensors["weight"].dtype == x.dtype
        return self.finish(y.astype(x.dtype) if narrow else y)

    def finish(self, y: Array) -> Array:
        """Gives the activation of the product."""
        return y if self.activation is None else ACTIVATIONS[self.activation](y)

    def _arguments(self) -> str:
        more = "" if "bias" in self.tensors else ", bias=False"
        more += "" if self.activation is None else f", activation={self.activation!r}"
        return f"{self.in_features}, {self.out_features}{more}"


class Embedding(Layer):
    """Rows of a table.

    Args:
        rows: How many rows there are.
        width: Size of a row.
        seed: For the table, drawn from a normal distribution of variance `2 / width`.
    """

    kind = "embedding"

    def __init__(self, rows: int, width: int, seed: int | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.tensors["weight"] = _random((rows, width), width, seed)

    @property
    def weight(self) -> Array:
        """The float table of shape (rows, width), dequantized if need be."""
        return _layers.float_tensor(self, "weight")

    def compute(self, x: Array, tensors: dict[str, Array]) -> Array:
        """Gives the rows of the table for integer ids of any shape."""
        found: Array = tensors["weight"][self.checked_ids(x)]
        return found

    def checked_ids(self, ids: Any) -> Array:
        """Gives ids as an array; TypeError for other than integers, IndexError out of range."""
        array: Array = np.asarray(ids)
        if array.dtype.kind not in "iu":
            raise TypeError(f"Expected integer ids. Received dtype {array.dtype}.")
        if array.size and not (array.min() >= 0 and array.max() < self.rows):
            raise IndexError(
                f"Expected ids from 0 to {self.rows - 1}. Received {array.min()} to {array.max()}."
            )
        return array

    def _arguments(self) -> str:
        return f"{self.rows}, {self.width}"


class LayerNorm(Layer):
    """Normalizes the last axis to mean 0 and variance 1, then scales and shifts it.

    Args:
        width: Size of the last axis.
        epsilon: Added to the variance.
    """

    kind = "norm"

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.width = width
        self.epsilon = epsilon
        self.tensors["weight"] = np.ones(width, np.float32)
        self.tensors["bias"] = np.zeros(width, np.float32)

    def compute(self, x: Array, tensors: dict[str, Array]) -> Array:
        """Gives the normalized input."""
        _kernels.check_last_axis(x, self.width)
        centered = x - x.mean(-1, keepdims=True)
        variance = np.square(centered).mean(-1, keepdims=True)
        normalized: Array = centered / np.sqrt(variance + x.dtype.type(self.epsilon))
        scaled: Array = normalized * tensors["weight"] + tensors["bias"]
        return scaled

    def _arguments(self) -> str:
        return f"{self.width}"


class Sequential(Layer):
    """Layers one after the other; their paths are their positions.

    Args:
        layers: The layers, first to last.
    """

    def __init__(self, layers: Sequence[Layer] = ()) -> None:
        super().__init__()
        for layer in layers:
            if not isinstance(layer, Layer):
                raise TypeError(f"Expected layers of policy_numpy. Received: {layer!r}")
        self.layers = list(layers)

    def __call__(self, x: Any, training: bool = False) -> Any:
        """Gives the output of the last layer."""
        for layer in self.layers:
            x = layer(x, training)
        return x

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Gives the layers with their positions."""
        yield from ((str(index), layer) for index, layer in enumerate(self.layers))


def _random(shape: tuple[int, ...], fan_in: int, seed: int | None) -> Array:
    if min(shape) < 0:
        raise ValueError(f"Sizes must not be negative. Received shape {shape}.")
    spread = np.sqrt(2 / max(fan_in, 1))
    values: Array = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values * np.float32(spread)
