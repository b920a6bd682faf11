"""How Keras reaches a product: by the adapter of the framework that it runs on.

Keras's backend is fixed when Keras is imported, so this is decided once. Each of `_torch`, `_jax`
and `_tensorflow` has the same names in it; `Products` says what they give.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, cast

import keras

from policy_core._backend import Backend, backend
from policy_core._forms import Axes
from policy_core._plan import Plan
from policy_core.errors import BackendError

Tensors = dict[str, Any]


class Products(Protocol):
    """What a framework's module offers; tensors are the framework's own."""

    def kernel_table(
        self, tensor: Any, axes: Axes | None
    ) -> tuple[str, tuple[tuple[str, str, str], ...]]:
        """Gives the kind of device of a weight, and the kernels there, for a LayerSpec.

        Args:
            tensor: The weight as it is stored, or any tensor of a layer that has none.
            axes: Which of its axes make up (out, in), where it is a float.
        """

    def place_of(self, variable: Any) -> Any:
        """Gives where a float weight's variable is, for `made_at` and `layout`."""

    def made_at(self, place: Any) -> AbstractContextManager[Any]:
        """Gives a scope in which variables are made there."""

    def layout(
        self, place: Any, shape: tuple[int, ...] | None = None, axes: Axes | None = None
    ) -> Any:
        """Gives how a variable is spread over devices, as Keras takes it; None for Keras's own way.

        Args:
            place: Where a float weight is, or was.
            shape: That of a new variable; None for the weight itself.
            axes: The weight's axes that make up the two of `shape`, (out, in) or (out, …); None for
                a variable that is the same on each device.
        """

    def store(self, codes: Any, plan: Plan, multiplies: bool) -> tuple[str, Any]:
        """Gives codes of shape (n, k) as a layer keeps them, and the name of the attribute.

        Args:
            codes: The codes.
            plan: The layer's plan.
            multiplies: Whether the layer multiplies by them; an embedding alone reads single rows.
        """

    def restore(self, stored: Any, shape: tuple[int, int], dtype: str) -> Any:
        """Gives the codes that were stored, of a shape and a dtype."""

    def linear(
        self,
        plan: Plan,
        shape: tuple[int, int],
        x: Any,
        tensors: Tensors,
        training: bool,
        group: Any,
    ) -> tuple[Any, Tensors]:
        """Gives a quantized product, and the delayed-scaling state after it.

        Args:
            plan: A quantized plan.
            shape: The weight's (n, k).
            x: Floats of shape (..., k) in the compute dtype.
            tensors: Those of `plan.storage`, codes as they are stored; state as the variables hold
                it.
            training: Whether delayed-scaling state moves.
            group: What `policy_torch.share_amax` gave the layer: the processes over which an amax is
                a maximum. None for this one, and for those that the framework itself knows of.

        Returns:
            Floats of shape (..., n) in the compute dtype; the state tensors to write, by name.
        """

    def rows(self, plan: Plan, shape: tuple[int, int], ids: Any, stored: Any, scale: Any) -> Any:
        """Gives `codes[ids] * scale[ids]` in the compute dtype."""

    def frozen_weight(self, plan: Plan, tensors: Tensors) -> tuple[Any, Any]:
        """Gives the weight's codes and scales as a trainable layer uses them outside training."""

    def gradient_state(self, layer: Any, name: str, value: Any, layout: Any) -> Any:
        """Gives the one variable, scale first, that holds an output gradient's state.

        None where its two tensors are variables as all others.
        """


CODES, PACKED = "weight_codes", "weight_packed"
"""The attributes of the variable that holds codes, plain or as the native kernels read them."""

_MODULES = {"torch": "_torch", "jax": "_jax", "tensorflow": "_tensorflow"}
NAME: str = keras.config.backend()


def _products() -> Products:
    if NAME not in _MODULES:
        raise BackendError(
            f"Keras runs on {NAME!r}, which has no training and no kernels here. Set KERAS_BACKEND "
            f"to one of {', '.join(_MODULES)} before Keras is imported."
        )
    return cast(Products, import_module(f".{_MODULES[NAME]}", __package__))


FRAMEWORK: Backend = backend(NAME)
PRODUCTS = _products()
