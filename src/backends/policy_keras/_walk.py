"""Walks a tree of Keras layers: which are layers to wrap, what each holds, and its names.

A layer's path joins, from the model down, one part for each layer: its `name` where someone gave it
one; else, in a Sequential or Functional model, its position among the model's layers, and in any
other layer the attribute that holds it. Names that Keras makes up, such as `dense_3`, differ from
one instance of a model to the next, and are no parts of paths.
"""

import re
from dataclasses import replace
from typing import Any

import keras

from policy_core import DTypePolicyMap
from policy_core._backend import Site, Wrapping
from policy_core._dtypes import shorten
from policy_core._plan import LayerSpec, TensorSpec, plan

from . import _keras, _reversible, _takeover
from ._adapters import LayerAdapter, reason_against
from ._classes import Wrapped, adapter_of, base_class
from ._kernels import PRODUCTS
from ._layers import Quantized
from ._policies import from_keras
from ._stored import Stored, float_tensors, quantized_tensors


def walk(model: Any, unbuilt: bool = False) -> list[Site]:
    """Gives every layer of a model once, with all its paths.

    A layer is one without layers inside, or one that has variables of its own beside them.

    Args:
        model: A `keras.Layer`, such as a model.
        unbuilt: Whether layers may lack their variables.

    Raises:
        TypeError: The model is no `keras.Layer`.
        ValueError: A layer has no variables yet.
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(f"Expected a keras.Layer. Received: {shorten(model)}")
    paths: dict[int, list[str]] = {}
    layers: dict[int, tuple[Any, str, Any]] = {}
    for path, named, layer, parent in _layers(model, "", "", None, ()):
        if not (layer.built or unbuilt):
            raise ValueError(
                f"{type(layer).__name__} at {path!r} has no variables yet. Call the model once, "
                "then wrap it."
            )
        layers.setdefault(id(layer), (layer, named, parent))
        if path not in paths.setdefault(id(layer), []):
            paths[id(layer)].append(path)
    sites = []
    for key, (layer, named, parent) in layers.items():
        sites.append(_site(tuple(paths[key]), layer, named, parent))
        inside = _reversible.projection_of(layer)
        if inside is not None:
            below = tuple(_join(path, inside.name) for path in paths[key])
            sites.append(_site(below, inside, _join(named, inside.name), layer))
    return sites


def _layers(
    layer: Any, path: str, named: str, parent: Any, above: tuple[int, ...]
) -> list[tuple[str, str, Any, Any]]:
    if id(layer) in above:
        return []
    inside = _keras.sublayers(layer)
    found = []
    if not inside or _keras.own_variables(layer):
        found.append((path, named, layer, parent))
    for part, child in parts_of(layer):
        names = _join(named, child.name)
        found += _layers(child, _join(path, part), names, layer, (*above, id(layer)))
    return found


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def parts_of(layer: Any) -> list[tuple[str, Any]]:
    """Gives the layers that a layer holds, each with its part of a path; twice for two places."""
    inside = _keras.sublayers(layer)
    if isinstance(layer, _keras.GRAPHS):
        return [(_given_name(child) or str(i), child) for i, child in enumerate(inside)]
    places = _places(layer)
    names = [_given_name(child) for child in inside]
    parts: list[tuple[str, Any]] = []
    for name, child in zip(names, inside, strict=True):
        held = places.get(id(child), [child.name])
        unique = name and names.count(name) == 1
        parts += [(part, child) for part in ([name] if unique and name else held)]
    return parts


def _given_name(layer: Any) -> str:
    """Gives a layer's name if it is none that Keras makes up for its class; else `""`."""
    made_up = re.escape(_keras.to_snake_case(base_class(layer).__name__))
    return "" if re.fullmatch(rf"{made_up}(_\d+)?", layer.name) else layer.name


def _places(layer: Any) -> dict[int, list[str]]:
    """Gives, by id, the attributes under which a layer holds others: `name` or `name/index`."""
    attributes = {**vars(layer), **vars(layer).get("_modules", {})}
    skipped = {"_layers", "_modules", "_tracker", "_parent", "_functional"}
    found: dict[int, list[str]] = {}

    def look(name: str, value: Any, depth: int) -> None:
        if isinstance(value, keras.Layer):
            places = found.setdefault(id(value), [])
            if name not in places:
                places.append(name)
        elif depth and isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                look(f"{name}/{i}", item, depth - 1)
        elif depth and isinstance(value, dict):
            for key, item in value.items():
                look(f"{name}/{key}", item, depth - 1)

    for name, value in attributes.items():
        # What starts with `_self_` is TensorFlow's own bookkeeping of the same attributes.
        bookkeeping = name in skipped or name.startswith("_self_") or value is layer._layers
        if not bookkeeping:
            look(name, value, 3)
    return found


def _site(paths: tuple[str, ...], layer: Any, named: str, parent: Any) -> Site:
    adapter = adapter_of(layer)
    wrapping = layer._policy_wrapping if isinstance(layer, Wrapped) else None
    tensors, plain = tensors_of(layer, adapter)
    spec = spec_of(layer, adapter, paths[0], tensors, plain, parent)
    aliases = [named, layer.path]
    if _reversible.owner_of(layer) is not None and parent is not None:
        # A rule for the layer as Keras knows it is one for both of its tables.
        above = [name.rpartition("/")[0] for name in (*paths, named)]
        aliases += [*above, parent.path]
    return Site(
        paths=paths,
        layer=layer,
        spec=spec,
        tensors=dict(tensors),
        wrapping=None if wrapping is None else _wrapping_here(wrapping, spec),
        aliases=tuple(name for name in dict.fromkeys(aliases) if name and name not in paths),
    )


def tensors_of(
    layer: Any, adapter: LayerAdapter
) -> tuple[dict[str, Stored], tuple[TensorSpec, ...]]:
    """Gives a layer's tensors, and the specs that they have, or had, when it was plain."""
    if isinstance(layer, Wrapped):
        quantized = isinstance(layer, Quantized)
        tensors = quantized_tensors(layer) if quantized else float_tensors(layer, adapter)
        return tensors, layer._policy_plain
    if _takeover.mode_of(layer) is not None and adapter.weight:
        return _takeover.tensors_of(layer, adapter)
    tensors = float_tensors(layer, adapter)
    return tensors, tuple(TensorSpec(n, t.shape, t.dtype) for n, t in tensors.items())


def spec_of(
    layer: Any,
    adapter: LayerAdapter,
    path: str,
    tensors: dict[str, Stored],
    plain: tuple[TensorSpec, ...],
    parent: Any = None,
) -> LayerSpec:
    """Gives what the plan needs to know about a layer, as if it were not wrapped."""
    first = next(iter(tensors.values()), None)
    device, kernels = PRODUCTS.kernel_table(
        None if first is None else _keras.raw(first.variable),
        None if first is None else first.axes,
    )
    kind = adapter.kind
    left_out = reason_against(layer, adapter)
    if isinstance(parent, keras.layers.SpectralNormalization) and adapter.weight:
        left_out = "SpectralNormalization writes to its kernel at each training call"
    if kind == "linear" and not left_out:
        kernels = tuple(row for row in kernels if not row[0].startswith("rows"))
    return LayerSpec(
        path=path,
        layer_type=base_class(layer).__name__,
        kind=kind,
        tensors=plain,
        contracted_axes=(1,) if adapter.weight else (),
        device=device,
        left_out=left_out,
        kernels=kernels,
    )


def _wrapping_here(wrapping: Wrapping, spec: LayerSpec) -> Wrapping:
    """Gives what a layer was wrapped with, with the kernel that runs where the layer is now."""
    made = wrapping.plan
    mode = made.policy.quantization
    frozen = made.quantized and not made.trainable and mode is not None and mode.scheme.trainable
    here = plan(made.asked, spec, frozen)
    if here.policy != made.policy or (here.kernel, here.note) == (made.kernel, made.note):
        return wrapping
    return replace(wrapping, plan=replace(made, kernel=here.kernel, note=here.note))


def rules_of(policy: Any, sites: list[Site]) -> Any:
    """Gives a map of Keras's, whose keys are `layer.path`s, as rules for paths of ours.

    Keys that match no `layer.path` stay, and mean our paths, as in any other map.
    """
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy
    ours = from_keras(policy)
    assert isinstance(ours, DTypePolicyMap)
    rules: dict[str, Any] = {}
    used: set[str] = set()
    for site in sites:
        for layer in (site.layer, _reversible.owner_of(site.layer)):
            name = layer.path if layer is not None and layer.path else ""
            matching = [key for key in policy if key == name] or [
                key for key in policy if re.fullmatch(key, name)
            ]
            if matching:
                rules.update(dict.fromkeys(site.paths, from_keras(policy[name])))
                used.update(matching)
                break
    rules.update({key: ours[key] for key in ours if key not in used and key not in rules})
    return DTypePolicyMap(from_keras(policy.default_policy), rules)


def reason_to_refuse(layer: Any) -> str:
    """Says why a layer cannot be wrapped under any policy; `""` if it can."""
    if _keras.is_nnx_enabled():
        return "Keras's NNX mode is on, in which layers cannot change their class. Turn it off."
    return ""
