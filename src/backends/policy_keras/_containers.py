"""Layers that hold layers: what policy they follow, and how they are saved.

A container, such as a model or a MultiHeadAttention, casts its own inputs, so it takes the float
policy that all wrapped layers inside have in common; where they differ it keeps its own. Sequential
and Functional models write each layer's config themselves. Any other container makes its layers
anew when it is loaded, so its class is changed too, and its config tells what they shall become.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from . import _keras
from ._classes import Changed, Wrapped, base_class, entry_of, wrapped_class
from ._layers import FloatLayer
from ._policies import from_keras, to_keras
from ._walk import walk


class Container(Changed):
    """A layer that makes wrapped layers anew when it is loaded."""

    def _entry(self, config: dict[str, Any]) -> dict[str, Any]:
        layers = {
            site.path: entry_of(site.layer)
            for site in walk(self, unbuilt=True)
            if isinstance(site.layer, Wrapped)
        }
        plain = vars(self).get("_policy_plain_dtype")
        written = config.get("dtype")
        written = written.get("config") if isinstance(written, dict) else None
        if plain is not None and written == self._dtype_policy.get_config():
            # Its layers are made as they were before they were wrapped.
            config["dtype"] = plain.name
            if isinstance(plain, keras.dtype_policies.DTypePolicyMap):
                # A copy: Keras changes a map's policies when it serializes them.
                config["dtype"] = keras.dtype_policies.serialize(to_keras(from_keras(plain)))
        return {"layers": layers}

    def build_from_config(self, config: Any) -> None:
        """Builds the layer, and what is to be wrapped inside."""
        super().build_from_config(config)  # type: ignore[misc]
        # As Keras says of it next. Then it compiles, for the variables that are there.
        self.built = True
        self._settle_pending()

    def load_own_variables(self, store: Any) -> None:
        """Loads the layer's own variables, before those of the layers inside."""
        self._settle_pending()
        super().load_own_variables(store)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        # Not while it runs: its inputs were cast to the dtype of before.
        self._settle_pending()
        return outputs

    def _settle_pending(self) -> None:
        if "_policy_pending" in vars(self):
            from ._saving import settle_pending  # it makes these classes

            settle_pending(self)


class Holder(Container, FloatLayer):
    """A container with variables of its own, and so a layer under a policy too."""


def holders(model: Any) -> list[Any]:
    """Gives all layers of a model, itself too; on torch also the models inside of Sequential ones."""
    found: dict[int, Any] = {}
    waiting = [model]
    while waiting:
        layer = waiting.pop()
        if id(layer) in found:
            continue
        found[id(layer)] = layer
        inside = [vars(layer).get("_functional"), *vars(layer).get("_modules", {}).values()]
        waiting += [*layer._layers, *(x for x in inside if isinstance(x, keras.Layer))]
    return list(found.values())


def forget(layers: list[Any], changed: Any) -> None:
    """Removes from containers on torch the parameters that a changed layer no longer has.

    Keras keeps for each of them a list of torch's parameters by path, which would keep float
    weights alive.
    """
    if keras.config.backend() != "torch":
        return
    alive = {id(v._value) for v in changed.variables}
    own = changed._modules.get("_torch_params")
    gone = {id(p) for p in own.values() if id(p) not in alive} if own is not None else set()
    for layer in layers:
        held = layer._modules.get("_torch_params")
        for key in [k for k, p in held.items() if id(p) in gone] if held is not None else ():
            held.pop(key)


def settle(model: Any, unwrapped: Sequence[Any] = ()) -> None:
    """Brings containers into line after layers inside them have changed.

    Args:
        model: The model.
        unwrapped: Layers that have just become plain.
    """
    for layer in reversed(holders(model)):
        if isinstance(layer, keras.Model):
            # They were traced with the layers as they were.
            layer.train_function = layer.test_function = layer.predict_function = None
        if not isinstance(layer, Wrapped) and _keras.sublayers(layer):
            _settle_one(layer, {id(x) for x in unwrapped})
        if keras.config.backend() == "torch" and "_torch_params" in layer._modules:
            layer._track_variables()
    _warn_of_compiled(model)


def _settle_one(layer: Any, unwrapped: set[int]) -> None:
    below = layer._flatten_layers(include_self=False)
    inside = [x for x in below if isinstance(x, Wrapped)]
    fields = vars(layer)
    if not inside:
        if "_policy_plain_dtype" in fields:
            fields["_dtype_policy"] = fields.pop("_policy_plain_dtype")
        elif any(id(x) in unwrapped for x in below):
            # Loaded from a file, in which it had the policy of its layers already.
            names = {x.dtype_policy.name for x in below if not _keras.sublayers(x)}
            if len(names) == 1:
                fields["_dtype_policy"] = keras.DTypePolicy(names.pop())
        if isinstance(layer, Container):
            object.__setattr__(layer, "__class__", layer._policy_base)
        return
    sources = {x.policy_plan.policy.source_policy.name for x in inside}
    if len(sources) == 1:
        fields.setdefault("_policy_plain_dtype", fields["_dtype_policy"])
        fields["_dtype_policy"] = keras.DTypePolicy(*sources)
    # Subclasses of Keras's graphs may make their layers anew too, as the models of keras_hub do;
    # and a graph's own config lacks its policy, which tells compile to scale the loss.
    base = base_class(layer)
    says_all = base in _keras.GRAPHS and sources != {"mixed_float16"}
    object.__setattr__(layer, "__class__", base if says_all else wrapped_class(Container, base))


def _warn_of_compiled(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not getattr(model, "compiled", False):
        return
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if getattr(optimizer, "built", False) or (
        model.dtype_policy.name == "mixed_float16" and not scaled
    ):
        warnings.warn(
            "The model was compiled before its layers changed: its optimizer knows the variables "
            "and the loss scaling of before. Call model.compile again before model.fit.",
            stacklevel=5,
        )
