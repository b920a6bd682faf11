"""Variables of modules: where they are, how one takes the place of another, and who reads them."""

import contextlib
import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from ._adapters import adapter_for
from ._classes import base_class, is_function
from ._ops import Tensor
from ._walk import leaves, modules_of, portable_name

Casts = dict[int, tuple[Any, tf.Variable]]
"""Variables that took the place of others, by these others' ids, with a weak reference to them."""


def state_variable(value: Tensor, name: str) -> tf.Variable:
    """Gives a new variable that no optimizer trains."""
    return tf.Variable(
        value,
        trainable=False,
        name=name,
        # Replicas compute the same value.
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def beside(layer: Any) -> Any:
    """Gives a scope in which variables are made where the module's own are."""
    for _, variable in leaves(layer):
        if isinstance(variable, tf.Variable):
            return beside_variable(variable)
    return contextlib.nullcontext()


class Place(NamedTuple):
    """Where a variable is: the strategy that mirrors it, or else None and a device."""

    strategy: Any
    device: str


def place_of(variable: tf.Variable) -> Place:
    """Gives where a variable is, without a hold on it."""
    strategy = getattr(variable, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return Place(None, variable.device)
    return Place(strategy, "")


def made_at(place: Place) -> Any:
    """Gives a scope in which variables are made at a place."""
    if place.strategy is None:
        return tf.device(place.device)
    if place.strategy is tf.distribute.get_strategy():
        return contextlib.nullcontext()
    return place.strategy.scope()


def beside_variable(variable: tf.Variable) -> Any:
    """Gives a scope in which variables are made where another is: mirrored if that is."""
    return made_at(place_of(variable))


def memory_of(variable: tf.Variable) -> Any:
    """Gives a weak reference to what a variable, and each function that captured it, holds."""
    one = variable.values[0] if hasattr(variable, "values") else variable
    return weakref.ref(one.handle)


def check_place(layer: Any, name: str) -> None:
    """Raises ValueError for a variable that no other can take the place of."""
    *inside, _ = _place(layer, name)
    owner: Any = layer
    for part in inside:
        owner = _item(owner, part)
        if isinstance(owner, tuple):
            raise ValueError(
                f"{type(layer).__name__} holds {name!r} in a tuple, which cannot take a variable of "
                "another dtype. Use a list."
            )


# Places of variables: attributes, or items of lists and dicts that are attributes.


def _place(layer: Any, name: str) -> tuple[str, ...]:
    """Gives the way to a variable of a portable name."""
    adapter = adapter_for(base_class(layer))
    return next(
        path
        for path, value in leaves(layer)
        if isinstance(value, tf.Variable) and portable_name(adapter, path) == name
    )


def _item(owner: Any, part: str) -> Any:
    if isinstance(owner, tf.Module):
        return vars(owner)[part]
    if isinstance(owner, (list, tuple)):
        return owner[int(part)]
    return next(value for key, value in owner.items() if str(key) == part)


def variable_of(layer: Any, name: str) -> tf.Variable:
    """Gives a module's variable of a portable name."""
    found: Any = layer
    for part in _place(layer, name):
        found = _item(found, part)
    return found


def set_dtype(layer: Any, name: str, dtype: tf.DType, casts: Casts) -> None:
    """Gives a variable a dtype: a new one takes its place, the same one wherever it was used."""
    old = variable_of(layer, name)
    if old.dtype == dtype:
        return
    known, new = casts.get(id(old), (None, None))
    if known is None or known() is not old:
        with beside_variable(old):
            new = tf.Variable(
                tf.cast(old, dtype), trainable=old.trainable, name=old.name.partition(":")[0]
            )
        casts[id(old)] = (weakref.ref(old), new)
    *inside, last = _place(layer, name)
    owner: Any = layer
    for part in inside:
        owner = _item(owner, part)
    if isinstance(owner, tf.Module):
        setattr(owner, last, new)
    elif isinstance(owner, list):
        owner[int(last)] = new
    else:
        owner[next(key for key in owner if str(key) == last)] = new


def set_value(layer: Any, name: str, value: Tensor) -> None:
    """Gives a variable a value of its portable shape."""
    adapter = adapter_for(base_class(layer))
    variable = variable_of(layer, name)
    if name == "weight" and adapter.transposed:
        value = tf.transpose(value)
    variable.assign(tf.cast(value, variable.dtype))


def forget_traces(model: tf.Module) -> None:
    """Makes the `tf.function`s of a model trace anew: what they traced reads its old variables.

    Raises:
        ValueError: A module holds a traced function as an attribute, of which that cannot be asked.
    """
    modules = modules_of(model)
    for module in modules:
        for name, value in vars(module).items():
            if is_function(value) and value.experimental_get_tracing_count():
                raise ValueError(
                    f"{type(module).__name__}.{name} is a tf.function that was traced already, and "
                    "would go on with the weights that it saw. Wrap the model before its first call."
                )
    for module in modules:
        for kind in type(module).__mro__:
            for value in vars(kind).values():
                if is_function(value):
                    # There is no public way; a method's function for an object is made on demand.
                    value._descriptor_cache.pop(module, None)
