"""Wrapped classes: a mixin in front of the layer's own class, so that the layer stays one of it."""

import copy
import functools
import inspect
from typing import Any

import keras

from policy_core import DTypePolicy, serialize
from policy_core._backend import Wrapping
from policy_core._plan import Plan, TensorSpec

from . import _keras
from ._adapters import TIED, UNTIED, LayerAdapter, adapter_for
from ._forms import Form
from ._remat import rematerialized

VERSION = 1
"""Of what a wrapped layer's config and variables say."""


class Changed:
    """What every layer has whose class `wrap` changed.

    A layer is wrapped by giving it a class of the same name with a mixin in front of its own. The
    object stays, and with it the nodes of Functional graphs, references and `isinstance`.
    """

    _policy_base: type
    _policy_mixin: "type[Changed]"
    _dtype_policy: Any

    @property
    def dtype_policy(self) -> Any:
        """The layer's policy, as Keras has it.

        One object for the life of the layer, since Keras tells objects apart by their address while
        it serializes; and no other's, since Keras changes the policies in a map that it serializes.
        """
        shown = vars(self).get("_policy_shown")
        if type(shown) is not type(self._dtype_policy):
            shown = vars(self)["_policy_shown"] = copy.copy(self._dtype_policy)
        vars(shown).update(vars(self._dtype_policy))
        return shown

    @dtype_policy.setter
    def dtype_policy(self, value: Any) -> None:
        raise AttributeError(
            "A wrapped layer's policy cannot be set. Use policy_core.wrap(layer, "
            f"{getattr(value, 'name', value)!r}, on_wrapped='replace')."
        )

    def __repr__(self) -> str:
        own: str = super().__repr__()
        return f"{own.removesuffix('>')}, dtype_policy={self._dtype_policy!r}>"

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """Gives the layer's call as the `keras.RematScope` in which it was made wants it."""
        make = super().rematerialized_call  # type: ignore[misc]
        if keras.config.backend() != "jax":
            return make(layer_call, *args, **kwargs)
        return rematerialized(make, layer_call, args, kwargs)

    def __reduce__(self) -> Any:
        # Classes made at run time have no address that pickle could write down.
        return _keras.from_bytes, (_keras.to_bytes(self),)

    def get_config(self) -> dict[str, Any]:
        """Gives the base class's config, and what `wrap` decided, under `"policy_core"`."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        kept = {"version": VERSION, "base": _keras.class_config(self._policy_base)}
        kept.update(self._entry(config))
        return {**config, "policy_core": kept}

    def _entry(self, config: dict[str, Any]) -> dict[str, Any]:
        """Gives what `wrap` decided; may change the base class's config."""
        raise TypeError("A mixin must say what it puts into configs.")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Gives the layer that a config describes, of whichever class it names."""
        from ._saving import rebuild  # it makes these classes

        return rebuild(config)


class Wrapped(Changed):
    """What all wrapped layers have besides: their plan."""

    _policy_adapter: LayerAdapter
    _policy_wrapping: Wrapping
    _policy_plain: tuple[TensorSpec, ...]
    _policy_plain_dtype: Any
    _policy_form: Form | None

    @property
    def policy_plan(self) -> Plan:
        """Everything that was decided for the layer."""
        return self._policy_wrapping.plan

    @property
    def quantization_mode(self) -> str | None:
        """The mode of the layer's policy, as Keras's layers have it; None for a float layer."""
        mode = self.policy_plan.policy.quantization_mode
        return None if mode is None else str(mode)

    def quantized_call(self, *args: Any, **kwargs: Any) -> Any:
        """Gives the layer's output: what Keras calls on layers with a quantization mode."""
        return self.call(*args, **kwargs)  # type: ignore[attr-defined]

    def _entry(self, config: dict[str, Any]) -> dict[str, Any]:
        # The base class shall make a plain layer in the dtype of what is around it.
        source: DTypePolicy = self.policy_plan.policy.source_policy
        config["dtype"] = source.name
        return {"plain_dtype": self._policy_plain_dtype.name, **entry_of(self)}


def entry_of(layer: Any) -> dict[str, Any]:
    """Gives what a config keeps of a wrapped layer."""
    wrapping: Wrapping = layer._policy_wrapping
    plan = wrapping.plan
    mode = plan.policy.quantization
    frozen = plan.quantized and not plan.trainable and mode is not None and mode.scheme.trainable
    return {
        "policy": serialize(plan.asked),
        "frozen": frozen,
        # Why it is a float although its policy is not: only what is around it may tell.
        "left_out": "" if plan.quantized or not layer._policy_adapter.weight else plan.note,
        "bytes_before": wrapping.bytes_before,
    }


def base_class(layer: Any) -> type[Any]:
    """Gives the layer's own class, without the mixin."""
    return layer._policy_base if isinstance(layer, Changed) else type(layer)


def adapter_of(layer: Any) -> LayerAdapter:
    """Gives how a layer takes a policy."""
    adapter = adapter_for(base_class(layer))
    return UNTIED if adapter is TIED and not layer.tie_weights else adapter


_CLASSES: dict[tuple[type[Changed], type, str], type[Any]] = {}


def wrapped_class(mixin: type[Changed], base: type) -> type[Any]:
    """Gives the class of changed layers for a mixin and a layer's own class, made once."""
    # A class that is registered later may name another weight.
    weight = adapter_for(base).weight
    found = _CLASSES.get((mixin, base, weight))
    if found is None:
        made = _new_class(mixin, base, weight)
        # All under one name: a config says itself which class it is about.
        register = keras.saving.register_keras_serializable("policy_core", "Wrapped")
        found = _CLASSES[mixin, base, weight] = register(made)
    return found


def _new_class(mixin: type[Changed], base: Any, weight: str) -> type[Any]:
    attributes: dict[str, Any] = {
        "__module__": "policy_keras",
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_policy_base": base,
        "_policy_mixin": mixin,
    }
    if hasattr(mixin, "compute"):
        attributes["call"] = _call_of(base)
    if hasattr(mixin, "float_weight"):
        # What parents read: `kernel` or `embeddings`, beside the variable that is gone.
        attributes[weight.lstrip("_")] = property(lambda self: self.float_weight())
    if _keras.is_default(base.get_config):
        # Keras makes configs from constructor arguments for classes that leave it to Keras.
        attributes["get_config"] = _default_get_config(mixin)
    if hasattr(base, "export") and keras.config.backend() == "jax":
        attributes["export"] = _export_of(base)
    return type(base.__name__, (mixin, base), attributes)


def _export_of(base: Any) -> Any:
    @functools.wraps(base.export)
    def export(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ._export import plain_codes  # its layers are of these classes

        with plain_codes(self):
            return base.export(self, *args, **kwargs)

    return export


def _call_of(base: Any) -> Any:
    """Gives `call` of a mixin that computes, with the arguments of the base's own."""

    @functools.wraps(base.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)

    call.__signature__ = inspect.signature(base.call)  # type: ignore[attr-defined]
    return call


def _default_get_config(mixin: Any) -> Any:
    def get_config(self: Any) -> Any:
        return mixin.get_config(self)

    get_config._is_default = True  # type: ignore[attr-defined]
    return get_config


@keras.saving.register_keras_serializable("policy_core", "Wrapped")
class _First(Changed):
    """What reads configs of wrapped layers before a class of any was made."""
