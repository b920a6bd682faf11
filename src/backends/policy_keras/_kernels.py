"""How Keras reaches a product: by the adapter of the framework that it runs on.

Keras's backend is fixed when Keras is imported, so this is decided once. Each of `_torch`, `_jax`
and `_tensorflow` has the same names in it; `Products` says what they give.
"""

from importlib import import_module
from typing import Any, Protocol, cast

import keras

from policy_core._backend import Backend, backend
from policy_core._plan import Plan
from policy_core.errors import BackendError

Tensors = dict[str, Any]


class Products(Protocol):
    """What a framework's module offers; tensors are the framework's own."""

    def kernel_table(self, tensor: Any) -> tuple[str, tuple[tuple[str, str, str], ...]]:
        """Gives the kind of device of a tensor, and the kernels there, for a LayerSpec."""

    def pack(self, codes: Any, plan: Plan) -> Any:
        """Gives codes of shape (n, k) as the native kernels read them; None if they don't run."""

    def packed_bytes(self, plan: Plan) -> int | None:
        """Gives how many bytes `pack` gives here; None if it gives None."""

    def unpack(self, packed: Any, shape: tuple[int, int], dtype: str) -> Any:
        """Gives the codes that were packed."""

    def linear(
        self, plan: Plan, shape: tuple[int, int], x: Any, tensors: Tensors, training: bool
    ) -> tuple[Any, Tensors]:
        """Gives a quantized product, and the delayed-scaling state after it.

        Args:
            plan: A quantized plan.
            shape: The weight's (n, k).
            x: Floats of shape (..., k) in the compute dtype.
            tensors: Those of `plan.storage`, the weight packed where `pack` packs.
            training: Whether delayed-scaling state moves.

        Returns:
            Floats of shape (..., n) in the compute dtype; the state tensors to write, by name.
        """

    def rows(
        self, plan: Plan, shape: tuple[int, int], ids: Any, codes: Any, scale: Any, packed: bool
    ) -> Any:
        """Gives `codes[ids] * scale[ids]` in the compute dtype."""

    def frozen_weight(self, plan: Plan, tensors: Tensors) -> tuple[Any, Any]:
        """Gives the weight's codes and scales as a trainable layer uses them outside training."""

    def gradient_state(self, layer: Any, name: str, value: Any) -> Any:
        """Gives the one variable, scale first, that holds an output gradient's state.

        None where its two tensors are variables as all others.
        """


_MODULES = {"torch": "_torch", "jax": "_jax", "tensorflow": "_tensorflow"}
NAME: str = keras.config.backend()


def _products() -> Products:
    if NAME not in _MODULES:
        raise BackendError(
            f"Keras runs on {NAME!r}, which has no training and no kernels here. Set KERAS_BACKEND "
            f"to one of {', '.join(_MODULES)} before Keras is imported."
        )
    return cast(Products, import_module(f".{_MODULES[NAME]}", __package__))


PRODUCTS = _products()
FRAMEWORK: Backend = backend(NAME)
