"""Walks an equinox model, and gives a new one whose layers are changed as the core decided."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax

from policy_core._backend import Site, Step

from . import _sites
from ._equinox_layers import Form, PolicyLayer, form, rebuilt
from ._ops import SHAPES, Array
from ._sites import Stored
from ._states import Cell, state_of


def walk(model: eqx.Module) -> list[Site]:
    """Gives every layer once, with all its paths: leaves, and others that have arrays."""
    paths: dict[int, list[str]] = {}
    layers: dict[int, Any] = {}
    for path, layer in _flatten(model, ""):
        layers[id(layer)] = layer
        paths.setdefault(id(layer), []).append(path)
    anew = _computed_anew(model)
    return [_site(tuple(paths[key]), layer, anew.get(key, "")) for key, layer in layers.items()]


def _computed_anew(model: eqx.Module) -> dict[int, str]:
    """Gives why layers, by identity, can't be quantized whose weights others give them at each call."""
    kinds = (eqx.nn.WeightNorm, eqx.nn.SpectralNorm, eqx.nn.Shared)
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(_plain(node), kinds))
    return {
        id(layer): f"eqx.nn.{type(parent).__name__} gives it a weight at each call"
        for parent in map(_plain, nodes)
        if isinstance(parent, kinds)
        for name, value in vars(parent).items()
        for _, child in _modules_in(name, value)
        for _, layer in _flatten(child, "")
    }


def apply(model: eqx.Module, steps: Sequence[Step]) -> eqx.Module:
    """Gives a new model; layers and arrays that were shared stay shared."""
    shared: dict[int, dict[str, Array]] = {}
    changes: dict[int, Callable[[Any], Any]] = {}
    for step in steps:
        weight = step.site.tensors.get("weight")
        known = shared.setdefault(id(step if weight is None else weight.source), {})
        changes[id(step.site.layer)] = _changed(step, known)
    return map_layers(model, changes)


def unwrap(model: eqx.Module, sites: Sequence[Site]) -> eqx.Module:
    """Gives a new model of plain layers, in the dtypes that they had."""
    shared: dict[int, dict[str, Array]] = {}
    changes: dict[int, Callable[[Any], Any]] = {}
    for site in sites:
        weight = site.tensors.get("weight")
        known = shared.setdefault(id(site if weight is None else weight.source), {})
        arrays = {**_sites.plain_tensors(site), **known}
        known.update({name: arrays[name] for name in ("weight",) if name in arrays})
        shape = site.layer.shape
        changes[id(site.layer)] = _unwrapper(arrays, shape)
    return map_layers(model, changes)


def map_layers(model: Any, changes: dict[int, Callable[[Any], Any]]) -> Any:
    """Gives a model in which some layers, by identity, are replaced by what a function gives.

    The function is given the layer with the layers inside it replaced already.
    """
    return _mapped(model, changes, {})


# No functions inside functions that call themselves: such a cycle would keep the old model alive.
def _mapped(node: Any, changes: dict[int, Callable[[Any], Any]], done: dict[int, Any]) -> Any:
    """`map_layers`, with rebuilt nodes by the identity of the old: what is one object stays one."""
    if id(node) in done:
        return done[id(node)]
    if isinstance(node, eqx.Module):
        new = node
        attributes = {name: _mapped(value, changes, done) for name, value in vars(node).items()}
        if any(attributes[name] is not value for name, value in vars(node).items()):
            new = rebuilt(node, attributes)
        if id(node) in changes:
            new = changes[id(node)](new)
        done[id(node)] = new
        return new
    if isinstance(node, dict):
        items = {key: _mapped(value, changes, done) for key, value in node.items()}
        return node if all(items[key] is node[key] for key in node) else type(node)(items)
    if isinstance(node, (list, tuple)):
        values = [_mapped(value, changes, done) for value in node]
        if all(new is old for new, old in zip(values, node, strict=True)):
            return node
        return node._make(values) if hasattr(node, "_make") else type(node)(values)
    return node


def with_state(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Gives a function that runs another in training, and gives the model after it too.

    Args:
        function: Takes a model and other arguments, and calls the model.

    Returns:
        A function of the same arguments that gives what `function` gives, and the model with the
        float8 state that its calls left. Outside of it no call changes anything.

    >>> # y, model = with_state(lambda model, x: jax.vmap(model)(x))(model, x)
    """

    def run(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        cells: dict[int, Cell] = {}
        for _, layer in _flatten(model, ""):
            made = layer.wrapping.plan if isinstance(layer, PolicyLayer) else None
            if made is not None and made.delayed and made.trainable:
                cells[id(layer)] = Cell(state_of(layer.tensors))
        placed = {key: _cell_placer(cell) for key, cell in cells.items()}
        result = function(map_layers(model, placed), *args, **kwargs)
        return result, map_layers(model, {key: _state_taker(c) for key, c in cells.items()})

    return run


def _cell_placer(cell: Cell) -> Callable[[Any], Any]:
    return lambda layer: rebuilt(layer, {**vars(layer), "cell": cell})


def _state_taker(cell: Cell) -> Callable[[Any], Any]:
    return lambda layer: rebuilt(layer, {**vars(layer), "tensors": {**layer.tensors, **cell.state}})


def _plain(layer: Any) -> Any:
    return layer.layer if isinstance(layer, PolicyLayer) else layer


def _flatten(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    inside = list(_children(_plain(layer)))
    own = isinstance(layer, PolicyLayer) or bool(_arrays(layer))
    if own or (not inside and callable(layer)):
        yield path, layer
    for name, child in inside:
        yield from _flatten(child, f"{path}/{name}" if path else name)


def _children(layer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(layer, eqx.nn.Sequential):
        # Its layers have their positions for names, as in other frameworks.
        yield from ((str(i), inside) for i, inside in enumerate(layer.layers))
        return
    for name, value in vars(layer).items():
        yield from _modules_in(name, value)


def _modules_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, eqx.nn.StateIndex):
        return  # its arrays are the first values of a state, and no part of the model
    if isinstance(value, eqx.Module):
        # jax.vmap and jit of equinox are modules too, of functions: no layers.
        if not type(value).__module__.startswith("equinox._"):
            yield name, value
    else:
        for key, item in _items(value):
            yield from _modules_in(f"{name}/{key}", item)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())


def _arrays(layer: Any) -> dict[str, Array]:
    """Gives a plain layer's own arrays by attribute; those in containers by `name.key`."""
    return {name: a for key, value in vars(layer).items() for name, a in _arrays_in(key, value)}


def _arrays_in(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    if isinstance(value, jax.Array):
        if not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            yield name, value
    elif not isinstance(value, eqx.Module):
        for key, item in _items(value):
            yield from _arrays_in(f"{name}.{key}", item)


def _site(paths: tuple[str, ...], layer: Any, left_out: str) -> Site:
    plain = _plain(layer)
    what = form(plain)
    wrapping = layer.wrapping if isinstance(layer, PolicyLayer) else None
    if wrapping is not None and wrapping.plan.quantized:
        tensors = {
            spec.name: Stored(layer.tensors[spec.name], codes=spec)
            for spec in wrapping.plan.storage
        }
    else:
        tensors = {name: _stored(name, array, what) for name, array in _arrays(plain).items()}
    specs = None if wrapping is None else layer.plain
    reason = what.left_out or left_out
    spec = _sites.layer_spec(paths[0], type(plain).__name__, what.kind, tensors, specs, reason)
    return Site(paths=paths, layer=layer, spec=spec, tensors=tensors, wrapping=wrapping)


def _stored(name: str, array: Array, what: Form) -> Stored:
    if what.kind == "linear" and not what.left_out:
        return Stored(array, what.axes if name == "weight" else None, name == "bias")
    return Stored(array)


def _changed(step: Step, shared: dict[str, Array]) -> Callable[[Any], Any]:
    """Makes a layer's new tensors, and gives the function that puts them in."""
    site = step.site
    wrapping = step.wrapping
    if wrapping is None:
        arrays = {name: jax.numpy.asarray(a) for name, a in (step.floats or {}).items()}
        return lambda layer: _with_arrays(layer, arrays)
    plan = wrapping.plan
    new = _sites.made(step, plan, shared)
    if plan.quantized:
        names = ("weight",) if plan.trainable else ("weight", "weight_scale")
        shared.update({name: new[name] for name in names})
    specs = site.spec.tensors
    shape: tuple[int, ...] = ()
    if plan.quantized:
        shape = _shape_of(site.layer) or tuple(site.tensors["weight"].array.shape)

    def change(layer: Any) -> PolicyLayer:
        plain = _plain(layer)
        if not plan.quantized:
            plain = _with_arrays(plain, new, _shape_of(layer))
            return PolicyLayer(plain, {}, wrapping, specs)
        empty = {name: None for name in ("weight", "bias") if name in vars(plain)}
        return PolicyLayer(rebuilt(plain, {**vars(plain), **empty}), new, wrapping, specs, shape)

    return change


def _shape_of(layer: Any) -> tuple[int, ...]:
    """Gives the shape of the plain weight of a quantized layer, else `()`."""
    return layer.shape if isinstance(layer, PolicyLayer) else ()


def _unwrapper(arrays: dict[str, Array], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda layer: _with_arrays(layer.layer, arrays, shape)


def _with_arrays(layer: Any, arrays: dict[str, Array], shape: tuple[int, ...] = ()) -> Any:
    """Gives a plain layer that holds arrays, given in the files' shapes."""
    what = form(layer)
    attributes = dict(vars(layer))
    for name, array in arrays.items():
        head, *keys = name.split(".")
        attributes[head] = _put(attributes[head], keys, _native(name, array, what, layer, shape))
    return rebuilt(layer, attributes)


def _native(name: str, array: Array, what: Form, layer: Any, shape: tuple[int, ...]) -> Array:
    own: Any = getattr(layer, name, None)
    if name == "weight" and what.axes is not None and what.kind == "linear" and not what.left_out:
        return what.axes.from_file(SHAPES, array, shape or own.shape)
    if name == "bias" and what.kind == "linear" and own is None and isinstance(layer, eqx.nn.Conv):
        return array.reshape(-1, *(1,) * layer.num_spatial_dims)
    return array if own is None else array.reshape(own.shape)


def _put(value: Any, keys: list[str], array: Array) -> Any:
    if not keys:
        return array
    if isinstance(value, dict):
        key = next(k for k in value if str(k) == keys[0])
        return {**value, key: _put(value[key], keys[1:], array)}
    items = list(value)
    items[int(keys[0])] = _put(items[int(keys[0])], keys[1:], array)
    return value._make(items) if hasattr(value, "_make") else type(value)(items)
