"""What the contract suite needs to know about a framework's models, and the reference's answers."""

from typing import Any, ClassVar

import numpy as np

from ._contract_arrays import ArrayContract, oracle, same_bits

SOURCES = ("float32", "mixed_bfloat16")
MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
POLICIES = (
    *SOURCES,
    "mixed_float16",
    *(f"{mode}_from_{source}" for mode in MODES for source in SOURCES),
)


class Hooks(ArrayContract):
    """How a framework makes and runs its layers; see `policy_core.testing`."""

    mutable_models: ClassVar[bool] = True
    picklable: ClassVar[bool] = True

    def linear(self, weight: Any, bias: Any) -> Any:
        """Gives a plain linear layer.

        Args:
            weight: float32 numpy array of shape (out, in).
            bias: float32 numpy array of shape (out,), or None.
        """
        raise TypeError("A contract's subclass must define linear().")

    def embedding(self, table: Any) -> Any:
        """Gives a plain embedding layer for a float32 numpy array of shape (rows, width)."""
        raise TypeError("A contract's subclass must define embedding().")

    def norm(self, width: int) -> Any:
        """Gives a plain normalization layer over a last axis of some width."""
        raise TypeError("A contract's subclass must define norm().")

    def sequential(self, layers: list[Any]) -> Any:
        """Gives a model of layers one after the other, with paths "0", "1", ….."""
        raise TypeError("A contract's subclass must define sequential().")

    def run(self, model: Any, x: Any, training: bool = False) -> Any:
        """Gives a model's output for a numpy array, as a numpy array."""
        raise TypeError("A contract's subclass must define run().")

    def layers(self, model: Any) -> list[Any]:
        """Gives the layers of what `sequential` gave."""
        raise TypeError("A contract's subclass must define layers().")

    # Models for the tests.

    def mlp(self, seed: int = 0) -> Any:
        """Gives a linear layer, a norm and a linear layer: 8 to 16 to 4."""
        first, second = weights(seed)
        return self.sequential([self.linear(*first), self.norm(16), self.linear(*second)])

    def reference_mlp(self, seed: int = 0) -> Any:
        """Gives the same model on the reference backend."""
        first, second = weights(seed)
        return oracle().Sequential(
            [reference_linear(*first), oracle().LayerNorm(16), reference_linear(*second)]
        )

    def state(self, model: Any) -> dict[str, Any]:
        """Gives copies of all tensors of a model by path and name."""
        sites = self.backend.walk(model)
        return {
            f"{site.path}/{name}": np.array(self.array(tensor))
            for site in sites
            for name, tensor in site.tensors.items()
        }


class ReferenceHooks(Hooks):
    """The hooks of the reference backend."""

    backend_name = "numpy"
    __test__ = False

    def linear(self, weight: Any, bias: Any) -> Any:
        """Gives a plain Dense."""
        return reference_linear(weight, bias)

    def embedding(self, table: Any) -> Any:
        """Gives a plain Embedding."""
        layer = oracle().Embedding(*table.shape)
        layer.tensors["weight"] = table.copy()
        return layer

    def norm(self, width: int) -> Any:
        """Gives a plain LayerNorm."""
        return oracle().LayerNorm(width)

    def sequential(self, layers: list[Any]) -> Any:
        """Gives a Sequential."""
        return oracle().Sequential(layers)

    def run(self, model: Any, x: Any, training: bool = False) -> Any:
        """Gives the model's output."""
        return model(x, training=training)

    def layers(self, model: Any) -> list[Any]:
        """Gives the model's layers."""
        return list(model.layers)


def reference_linear(weight: Any, bias: Any) -> Any:
    """Gives a Dense of the reference backend with copies of two arrays."""
    layer = oracle().Dense(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.tensors["weight"] = weight.copy()
    if bias is not None:
        layer.tensors["bias"] = bias.copy()
    return layer


def inputs(rows: int, seed: int = 0) -> Any:
    """Gives a float32 array of shape (rows, 8)."""
    return np.random.default_rng(100 + seed).standard_normal((rows, 8), np.float32)


def assert_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Fails unless two states have the same names and bits."""
    assert left.keys() == right.keys()
    for name in left:
        assert same_bits(left[name], right[name]), name


def weights(seed: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Gives weight and bias of two linear layers, 8 to 16 to 4."""
    generator = np.random.default_rng(seed)
    shapes = ((16, 8), (4, 16))
    first, second = (
        (generator.standard_normal(s, np.float32), generator.standard_normal(s[0], np.float32))
        for s in shapes
    )
    return first, second
