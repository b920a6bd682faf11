"""Walks a tree of `tf.Module`s: which modules are layers, what each holds, what cannot be wrapped."""

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from policy_core._backend import Site
from policy_core._dtypes import shorten
from policy_core._plan import LayerSpec, TensorSpec

from ._adapters import LayerAdapter, adapter_for
from ._classes import CODES, SCALE, KeepsCodes, Stored, Wrapped, base_class, codes_of
from ._kernels import device_type, kernel_table
from ._ops import TF_DTYPES, dtype_name


def walk(model: Any) -> list[Site]:
    """Gives every layer of a model once, with all its paths.

    A layer is a module without modules inside, or one that has variables of its own beside them.

    Raises:
        TypeError: The model is no `tf.Module`, or holds layers of Keras.
        ValueError: A module has no weight yet.
    """
    if not isinstance(model, tf.Module) or _is_keras(model):
        raise TypeError(
            f"Expected a tf.Module, and no layer of Keras, which has a backend of its own. "
            f"Received: {shorten(model)}"
        )
    paths: dict[int, list[str]] = {}
    layers: dict[int, tf.Module] = {}
    for path, layer in _layers(model, "", ()):
        layers[id(layer)] = layer
        paths.setdefault(id(layer), []).append(path)
    return [_site(tuple(paths[key]), layer) for key, layer in layers.items()]


def modules_of(model: tf.Module) -> list[tf.Module]:
    """Gives a model and every module inside it, once."""
    return [model, *model.submodules]


def _layers(
    module: tf.Module, path: str, above: tuple[int, ...]
) -> Iterator[tuple[str, tf.Module]]:
    children: list[tuple[str, tf.Module]] = []
    own = False
    for parts, value in leaves(module):
        if isinstance(value, tf.Module) and not _is_keras(value):
            children.append(("/".join(parts), value))
        elif _is_keras(value):
            raise TypeError(
                f"{_join(path, '/'.join(parts))!r} is a layer of Keras, {shorten(value)}, inside a tf.Module. "
                "Wrap it by itself, and let the tf.Module not hold it as an attribute."
            )
        own = own or isinstance(value, tf.Variable)
    if not children or own:
        yield path, module
    for name, child in children:
        # A module that knows a module above it: that one is walked already.
        if id(child) not in (*above, id(module)):
            yield from _layers(child, _join(path, name), (*above, id(module)))


def leaves(module: tf.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Gives what a module's attributes hold, also in lists, tuples and dicts, by path."""
    ignored: Any = getattr(module, "_TF_MODULE_IGNORED_PROPERTIES", frozenset())
    for name, value in vars(module).items():
        if name not in ignored and not name.startswith("_self_"):
            yield from _leaves_in((name,), value)


def _leaves_in(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves_in((*path, str(index)), item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves_in((*path, str(key)), item)
    else:
        yield path, value


def _is_keras(value: Any) -> bool:
    return any(
        base.__module__.partition(".")[0] == "keras" and base.__name__ in ("Layer", "Operation")
        for base in type(value).__mro__
    )


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _site(paths: tuple[str, ...], layer: Any) -> Site:
    adapter = adapter_for(base_class(layer))
    tensors = tensors_of(layer, adapter)
    specs = layer._policy_plain if isinstance(layer, Wrapped) else _specs(tensors)
    weight = next((spec for spec in specs if spec.name == "weight"), None)
    device = next((device_type(t.variable.device) for t in tensors.values()), "cpu")
    contracted: tuple[int, ...] = ()
    left_out = ""
    if adapter.kind in ("linear", "embedding"):
        left_out = _reason_against(layer, adapter, weight)
        contracted = (1,)
    spec = LayerSpec(
        path=paths[0],
        layer_type=type(layer).__name__,
        kind=adapter.kind,
        tensors=specs,
        contracted_axes=contracted,
        device=device,
        left_out=left_out,
        kernels=kernel_table(device),
    )
    wrapping = layer._policy_wrapping if isinstance(layer, Wrapped) else None
    return Site(paths=paths, layer=layer, spec=spec, tensors=tensors, wrapping=wrapping)


def tensors_of(layer: Any, adapter: LayerAdapter) -> dict[str, Stored]:
    """Gives a module's own variables by their portable names, a linear weight as (out, in)."""
    tensors: dict[str, Stored] = {}
    keeps_codes = isinstance(layer, KeepsCodes)
    if keeps_codes:
        # In the order of the plan: the codes stand where the weight stood.
        tensors["weight"] = codes_of(layer)
    storage = layer._policy_wrapping.plan.storage if isinstance(layer, Wrapped) else ()
    shapes = {spec.name: spec.shape for spec in storage}
    for path, variable in leaves(layer):
        name = portable_name(adapter, path)
        if not isinstance(variable, tf.Variable) or (keeps_codes and name == CODES):
            continue
        if dtype_name(variable.dtype) not in TF_DTYPES:
            continue  # no numbers, such as strings: no policy concerns them
        if name in tensors:
            raise ValueError(
                f"{type(layer).__name__} has two variables that are called {name!r} in files."
            )
        if variable.shape.rank is None or not variable.shape.is_fully_defined():
            raise ValueError(
                f"{type(layer).__name__} has a variable {name!r} of shape {variable.shape}. "
                "Expected a shape that is known."
            )
        transposed = name == "weight" and adapter.transposed and variable.shape.rank == 2
        shape = tuple(variable.shape)
        if keeps_codes and name == SCALE:
            shape = shapes[SCALE]
        tensors[name] = Stored(
            variable, shape[::-1] if transposed else shape, transposed=transposed
        )
    return tensors


def portable_name(adapter: LayerAdapter, path: tuple[str, ...]) -> str:
    """Gives what a variable is called in files: its attribute, and where in that it is."""
    # Files join a layer's path and its tensors' names by slashes.
    name = ".".join(path).replace("/", ".")
    return adapter.renamed.get(name, name)


def _specs(tensors: dict[str, Stored]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tensor.shape, dtype_name(tensor.variable.dtype))
        for name, tensor in tensors.items()
    )


def _reason_against(layer: Any, adapter: LayerAdapter, weight: TensorSpec | None) -> str:
    kind = type(layer).__name__
    if adapter.left_out is not None and (reason := adapter.left_out(layer)):
        return reason
    if weight is None:
        raise ValueError(
            f"{kind} has no variable {adapter.weight!r} yet. Call the model once, then wrap it."
        )
    if len(weight.shape) != 2:
        return f"{kind} has a weight of shape {weight.shape}; a product needs two axes"
    return ""
