"""Which layers can be quantized, and how each kind is a product: one entry a class.

An entry serves the class and every subclass that does not override `call`. `register_layer` adds
one for a class of anyone's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras

from policy_core._dtypes import shorten
from policy_core._forms import IN_OUT, OUT_IN, Axes, Equation
from policy_core._plan import LayerKind

from ._forms import Form, patches
from ._keras import set_keras_mask

Linear = Callable[..., Any]
"""A layer's product, bias included: `linear(x)`, or `linear(x, dtype)` for another result dtype."""


@dataclass(frozen=True, kw_only=True)
class LayerAdapter:
    """How layers of one class take a policy.

    Attributes:
        kind: `"linear"` for a layer whose kernel multiplies; `"embedding"` for rows of a table;
            `"norm"` for a layer that computes in float32 inside; `"other"` for one without a
            quantized form.
        weight: The attribute of the variable that is quantized.
        form: Gives how a layer is a product, for `"linear"`.
        call: For `"linear"`: `call(layer, linear, *args, **kwargs)` gives the layer's output,
            where `linear(x)` is the product under the layer's policy, with the bias `layer.bias`.
        left_out: Says of one layer why it can't be quantized; `""` if it can.
    """

    kind: LayerKind
    weight: str = ""
    form: Callable[[Any], Form] | None = None
    call: Callable[..., Any] | None = None
    left_out: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "embedding", "norm", "other"):
            raise ValueError(
                "Expected kind 'linear', 'embedding', 'norm' or 'other'. "
                f"Received: kind={self.kind!r}"
            )
        if (self.kind in ("linear", "embedding")) is not bool(self.weight):
            raise ValueError("'weight' names the variable of kinds 'linear' and 'embedding'.")
        if self.kind == "linear" and self.call is None:
            raise ValueError("Kind 'linear' needs 'call'.")


def register_layer(cls: type, adapter: LayerAdapter) -> None:
    """Lets layers of a class take quantized policies, also if it overrides `call`.

    Args:
        cls: A subclass of `keras.Layer`.
        adapter: How its layers compute.

    Raises:
        TypeError: `cls` is no such class, or `adapter` no `LayerAdapter`.
        ValueError: `cls` is registered already with another adapter.
    """
    given: object = cls
    if not (isinstance(given, type) and issubclass(given, keras.Layer)):
        raise TypeError(f"Expected a subclass of keras.Layer. Received: {shorten(cls)}")
    if not isinstance(adapter, LayerAdapter):
        raise TypeError(f"Expected a policy_keras.LayerAdapter. Received: {shorten(adapter)}")
    if _REGISTERED.setdefault(cls, adapter) != adapter:
        raise ValueError(f"{cls.__name__} is registered already with another adapter.")


def adapter_for(cls: type) -> LayerAdapter:
    """Gives how layers of a class take a policy."""
    base: Any
    for base in cls.__mro__:
        if base not in _REGISTERED:
            continue
        adapter = _REGISTERED[base]
        # A subclass that overrides call does something that its base's entry cannot know.
        if cls is base or cls.call is base.call:  # type: ignore[attr-defined]
            return adapter
        if adapter.kind in ("linear", "embedding"):
            return replace(adapter, left_out=_overrides_call)
        return adapter
    if cls.__name__.endswith(("Norm", "Normalization")):
        return LayerAdapter(kind="norm")
    return LayerAdapter(kind="other")


def reason_against(layer: Any, adapter: LayerAdapter) -> str:
    """Says why a layer has no quantized form although its kind has one; `""` if it has one."""
    return "" if adapter.left_out is None else adapter.left_out(layer)


def form_of(layer: Any, adapter: LayerAdapter) -> Form | None:
    """Gives how a layer is a product; None for one that is none."""
    if adapter.form is None or reason_against(layer, adapter):
        return None
    return adapter.form(layer)


def _overrides_call(layer: Any) -> str:
    return (
        f"{type(layer).__name__} overrides call; it follows the source policy. pc.register_layer "
        "can say how it computes"
    )


def _lora(layer: Any) -> str:
    if not getattr(layer, "lora_enabled", False):
        return ""
    return (
        "LoRA is enabled, whose matrices train beside a float kernel; save and load the layer's "
        "weights, which merges them, and wrap the result"
    )


def _activated(layer: Any, linear: Linear, inputs: Any, training: Any = None) -> Any:
    y = linear(inputs)
    return y if layer.activation is None else layer.activation(y)


def dense_form(layer: Any) -> Form:
    """Gives how a Dense is a product."""
    return Form(IN_OUT)


def _einsum(layer: Any) -> Form:
    equation = Equation.parse(layer.equation)
    bias_axes = layer.bias_axes
    flat = bias_axes is None or [a for a in equation.out if a in bias_axes] == [
        a for a in equation.out if a in equation.rhs
    ]
    shape = tuple(layer_kernel_shape(layer)[axis] for axis in equation.axes.out)
    return Form(equation.axes, equation.arrange(keras.ops, shape), flat)


def layer_kernel_shape(layer: Any) -> tuple[int, ...]:
    """Gives the shape of an EinsumDense's kernel, whatever of it is left."""
    known = vars(layer).get("_policy_kernel_shape")
    return tuple(layer._kernel.shape) if known is None else known


def _einsum_left_out(layer: Any) -> str:
    try:
        Equation.parse(layer.equation)
    except ValueError as error:
        return f"the equation {error}"
    return _lora(layer)


def _conv(layer: Any) -> Form:
    rank = layer.rank
    axes = Axes((rank + 1,), tuple(range(rank + 1)))
    first = layer.data_format == "channels_first"
    return Form(
        axes,
        patches(layer.kernel_size, layer.strides, layer.padding, layer.dilation_rate, first),
    )


def _conv_left_out(layer: Any) -> str:
    if layer.groups != 1:
        return f"a convolution with {layer.groups} groups is no single product"
    return _lora(layer)


def _rows_of(layer: Any) -> Form:
    return Form(OUT_IN)


def _reversible(layer: Any, linear: Linear, inputs: Any, reverse: bool = False) -> Any:
    if not reverse:
        rows = layer.rows(inputs)
        mask = keras.layers.Embedding.compute_mask(layer, inputs)
        if mask is not None:
            set_keras_mask(rows, mask)
        return rows
    logits = linear(inputs, layer.reverse_dtype)
    cap = layer.logit_soft_cap
    return logits if cap is None else keras.ops.tanh(logits / cap) * cap


TIED = LayerAdapter(
    kind="linear", weight="_embeddings", form=_rows_of, call=_reversible, left_out=_lora
)
UNTIED = LayerAdapter(kind="embedding", weight="_embeddings", call=_reversible, left_out=_lora)
"""Of a ReversibleEmbedding with two tables; the second is a layer of its own."""
REVERSE_TABLE = "reverse_embeddings"
"""The attribute of the variable that is the second table."""

_CONV = LayerAdapter(
    kind="linear", weight="_kernel", form=_conv, call=_activated, left_out=_conv_left_out
)
_REGISTERED: dict[type, LayerAdapter] = {
    keras.layers.Dense: LayerAdapter(
        kind="linear", weight="_kernel", form=dense_form, call=_activated, left_out=_lora
    ),
    keras.layers.EinsumDense: LayerAdapter(
        kind="linear", weight="_kernel", form=_einsum, call=_activated, left_out=_einsum_left_out
    ),
    keras.layers.Conv1D: _CONV,
    keras.layers.Conv2D: _CONV,
    keras.layers.Embedding: LayerAdapter(kind="embedding", weight="_embeddings", left_out=_lora),
    keras.layers.ReversibleEmbedding: TIED,
    keras.layers.BatchNormalization: LayerAdapter(kind="norm"),
    keras.layers.LayerNormalization: LayerAdapter(kind="norm"),
    keras.layers.GroupNormalization: LayerAdapter(kind="norm"),
    keras.layers.RMSNormalization: LayerAdapter(kind="norm"),
    keras.layers.UnitNormalization: LayerAdapter(kind="norm"),
}
