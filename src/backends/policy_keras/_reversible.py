"""The second table of an untied ReversibleEmbedding, as a layer of its own.

A layer has one weight, and `keras.layers.ReversibleEmbedding(tie_weights=False)` has two: a table
to look rows up in, and one that projects back. The second is walked as a layer inside, `reverse`,
and is one from `wrap` until `unwrap`.
"""

import weakref
from typing import Any

import keras

from . import _keras, _takeover
from ._adapters import REVERSE_TABLE, UNTIED, LayerAdapter, Linear, dense_form, register_layer
from ._classes import Changed, adapter_of

NAME = "reverse"
"""The attribute that holds the layer inside, and its part of a path."""


@keras.saving.register_keras_serializable("policy_core")
class ReverseProjection(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    """The projection from rows of an embedding back to one number for each id.

    Args:
        units: How many ids there are.
        reverse_dtype: The dtype in which it computes; None for the compute dtype.
        **kwargs: Those of every layer.
    """

    def __init__(self, units: int, reverse_dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(units, **{**kwargs, "use_bias": False})
        self.reverse_dtype = reverse_dtype
        self.bias = None

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Gives `inputs @ kernel`."""
        kernel = self.kernel
        if self.reverse_dtype is not None:
            inputs = keras.ops.cast(inputs, self.reverse_dtype)
            kernel = keras.ops.cast(kernel, self.reverse_dtype)
        return keras.ops.matmul(inputs, kernel)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """Gives none: the layer around it has none in this direction."""

    def get_config(self) -> dict[str, Any]:
        """Gives the arguments that make it anew."""
        return {**super().get_config(), "reverse_dtype": self.reverse_dtype}


def _project(layer: Any, linear: Linear, inputs: Any, training: Any = None) -> Any:
    return linear(inputs, layer.reverse_dtype)


register_layer(
    ReverseProjection,
    LayerAdapter(kind="linear", weight="_kernel", form=dense_form, call=_project),
)


def projection_of(layer: Any) -> Any | None:
    """Gives a layer's second table as a layer, while the layer holds it itself; else None."""
    table = vars(layer).get(REVERSE_TABLE) if adapter_of(layer) is UNTIED else None
    if table is None:
        return None
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path] if layer.path else policy.default_policy
    projection: Any = ReverseProjection(
        layer.input_dim, layer.reverse_dtype, name=NAME, dtype=policy, trainable=layer.trainable
    )
    projection._kernel = table
    if _takeover.mode_of(layer) is not None:
        projection.kernel_scale = vars(layer).get(f"{REVERSE_TABLE}_scale")
        projection._is_quantized = True
    projection.built = True
    vars(projection).update(
        _path=f"{layer.path or layer.name}/{NAME}",
        _build_shapes_dict={"input_shape": (None, layer.output_dim)},
        _owner=weakref.ref(layer),
    )
    return projection


def owner_of(layer: Any) -> Any | None:
    """Gives the layer whose second table a layer is; None if it is none."""
    reference = vars(layer).get("_owner") if isinstance(layer, ReverseProjection) else None
    return None if reference is None else reference()


def put_inside(layer: Any) -> None:
    """Makes a second table the layer inside its owner, if it is one and not there yet."""
    owner = owner_of(layer)
    table = None if owner is None else vars(owner).get(REVERSE_TABLE)
    if table is None or table is not vars(layer).get("_kernel"):
        return
    for name in (REVERSE_TABLE, f"{REVERSE_TABLE}_scale"):
        _keras.drop_attribute(owner, name)
    _keras.add_layer(owner, NAME, layer)


def take_out(layer: Any) -> None:
    """Gives an owner its second table back, if both are plain again.

    Args:
        layer: The owner, or the layer inside; nothing happens to any other.
    """
    owner = owner_of(layer) or layer
    inside = getattr(owner, NAME, None)
    if type(inside) is ReverseProjection and not isinstance(owner, Changed):
        _keras.drop_layer(owner, NAME)
        _keras.add_variable(owner, REVERSE_TABLE, inside._kernel)
