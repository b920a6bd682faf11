"""What of Keras has no public name. The only file that reaches below `keras`' public face."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import KerasVariable as KerasVariable
from keras.src.backend.common import global_state
from keras.src.backend.common.keras_tensor import KerasTensor as KerasTensor
from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.config import is_nnx_enabled as is_nnx_enabled
from keras.src.models.functional import Functional
from keras.src.saving import saving_lib, serialization_lib
from keras.src.utils import python_utils
from keras.src.utils.naming import to_snake_case as to_snake_case

GRAPHS = (keras.Sequential, Functional)
"""Models that list their layers; these classes themselves write each layer's config."""


def held(variable: Any) -> Any:
    """Gives what a variable holds: its tensor, or on TensorFlow and torch the thing to write to."""
    with AutocastScope(None):
        return variable.value


def raw(variable: Any) -> Any:
    """Gives a variable's tensor in its own dtype, whatever autocast is on."""
    value = held(variable)
    # Keras's own conversion gives a TensorFlow variable back, to be read under another autocast.
    return value.read_value() if hasattr(value, "read_value") else value


@contextlib.contextmanager
def reading_in(dtype: str | None) -> Iterator[None]:
    """Makes layers read their float variables in a dtype; in their own for None."""
    with AutocastScope(dtype):
        yield


def scope_of_values() -> Any:
    """Gives the scope in which variables have other values than their own, as in JAX's trainer."""
    return get_stateless_scope() if in_stateless_scope() else None


class WritingScope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """A scope that starts with the values of the one around it, and knows what was written.

    Attributes:
        written: The variables that have new values, in the order of their first ones.
        whole: The outermost scope around it, that of a whole pass; None if there is none.
    """

    def __init__(self) -> None:
        super().__init__(collect_losses=True)
        around = scope_of_values()
        self.state_mapping.update({} if around is None else around.state_mapping)
        self.whole: Any = around.whole if isinstance(around, WritingScope) else around
        self.written: list[Any] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Takes a variable's new value."""
        if not any(variable is update[0] for variable in self.written):
            self.written.append(update[0])
        super().add_update(update)


def scope_of_pass() -> Any:
    """Gives the scope of values of a whole pass, not that of a part that JAX traces by itself."""
    scope = scope_of_values()
    return scope.whole if isinstance(scope, WritingScope) else scope


def is_tracing() -> bool:
    """Says whether Keras looks for shapes alone, and variables have no values yet."""
    return scope_of_values() is not None


def training_argument() -> bool:
    """Says whether the layer call that is running is one of training."""
    context = global_state.get_global_attribute("current_call_ctx")
    return bool(context is not None and context.get_value("training"))


def own_variables(layer: Any) -> list[Any]:
    """Gives the variables of a layer itself, trainable ones first."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def sublayers(layer: Any) -> list[Any]:
    """Gives the layers that a layer holds, each once, in the order in which it got them."""
    found: dict[int, Any] = {}
    for child in layer.layers if isinstance(layer, GRAPHS) else layer._layers:
        if not isinstance(child, keras.layers.InputLayer):
            found.setdefault(id(child), child)
    return list(found.values())


def add_variable(layer: Any, attribute: str, variable: Any) -> None:
    """Gives a built layer one more variable."""
    layer._tracker.unlock()
    layer._track_variable(variable)
    setattr(layer, attribute, variable)
    layer._lock_state()


def add_layer(layer: Any, attribute: str, child: Any) -> None:
    """Gives a built layer one more layer inside."""
    layer._tracker.unlock()
    setattr(layer, attribute, child)
    layer._lock_state()


def drop_layer(layer: Any, attribute: str) -> None:
    """Removes a layer inside another."""
    layer._tracker.untrack(getattr(layer, attribute))
    super(keras.Layer, layer).__delattr__(attribute)


def new_variable(layer: Any, name: str, value: Any, layout: Any) -> Any:
    """Gives a variable under a layer's name that neither optimizers nor autocast touch.

    Args:
        layer: The layer.
        name: The variable's name.
        value: Its value.
        layout: How it is spread over devices; None for Keras's own way.
    """
    dtype = keras.backend.standardize_dtype(value.dtype)
    options = {"dtype": dtype, "name": name, "layout": layout}
    with layer._open_name_scope():
        return keras.Variable(value, trainable=False, autocast=False, **options)


def drop_attribute(layer: Any, name: str) -> None:
    """Removes a variable from a layer, if it has it.

    What Keras's own `del layer.name` does, without its garbage collection for every single one.
    """
    variable = vars(layer).get(name)
    if isinstance(variable, KerasVariable):
        layer._untrack_variable(variable)
    if name in vars(layer):
        super(keras.Layer, layer).__delattr__(name)


def recast(variable: Any, dtype: str) -> None:
    """Gives a variable another dtype; the object stays, and with it whatever refers to it."""
    if variable._dtype == dtype:
        return
    refill(variable, keras.ops.cast(raw(variable), dtype))


def refill(variable: Any, value: Any) -> None:
    """Gives a variable a value of another shape and dtype."""
    variable._dtype = keras.backend.standardize_dtype(value.dtype)
    variable._initialize(value)
    variable._ndim = len(variable.shape)


def refresh_signature(layer: Any) -> None:
    """Tells a layer, whose class has changed, what arguments its `call` takes."""
    import inspect

    signature = inspect.signature(layer.call)
    names = list(signature.parameters)
    fields = {
        "_call_signature": signature,
        "call_signature_parameters": names,
        "_call_has_training_arg": "training" in names,
        "_call_has_mask_arg": "mask" in names,
        "_call_has_context_arg": {arg: arg in names for arg in layer._call_context_args},
    }
    for name, value in fields.items():
        vars(layer)[name] = value


def is_default(method: Any) -> bool:
    """Says whether a method is one that Keras's base class brings."""
    return bool(python_utils.is_default(method))


def class_config(cls: type) -> dict[str, Any]:
    """Gives what a config says of a class: module, class_name and registered_name."""
    found = serialization_lib.serialize_with_public_class(cls, {})
    if found is None:
        found = {"module": cls.__module__, "class_name": cls.__name__, "registered_name": None}
    return {name: found[name] for name in ("module", "class_name", "registered_name")}


def to_bytes(layer: Any) -> Any:
    """Gives a layer or model as a file in memory, as Keras's own pickle support does."""
    import io

    buffer = io.BytesIO()
    saving_lib._save_model_to_fileobj(layer, buffer, "h5")
    return buffer


def from_bytes(buffer: Any) -> Any:
    """Gives back what `to_bytes` wrote."""
    return saving_lib._load_model_from_fileobj(
        buffer, custom_objects=None, compile=True, safe_mode=False
    )
