"""Walks a flax nnx model, and changes its layers in place as the core decided."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from policy_core._backend import Site, Step
from policy_core._plan import STATE_SUFFIXES, TensorSpec

from . import _sites
from ._nnx_forms import FILE_NAMES, form, known_base
from ._nnx_layers import (
    Codes,
    Float8GradientState,
    Float8State,
    PolicyModule,
    plain_class,
    quantized_tensors,
    wrapped_class,
)
from ._ops import SHAPES, Array
from ._sites import Stored


def walk(model: nnx.Module) -> list[Site]:
    """Gives every layer once, with all its paths: leaves, and others that have variables."""
    paths: dict[int, list[str]] = {}
    layers: dict[int, Any] = {}
    for path, layer in _flatten(model, ""):
        layers[id(layer)] = layer
        paths.setdefault(id(layer), []).append(path)
    anew = _computed_anew(model)
    return [_site(tuple(paths[key]), layer, anew.get(key, "")) for key, layer in layers.items()]


def _computed_anew(model: nnx.Module) -> dict[int, str]:
    """Gives why layers, by identity, can't be quantized whose weights others compute at each call."""
    return {
        id(layer): f"nnx.{type(norm).__name__} computes its weight anew at each call"
        for _, norm in nnx.iter_modules(model)
        if isinstance(norm, (nnx.WeightNorm, nnx.SpectralNorm))
        for _, layer in nnx.iter_modules(norm.layer_instance)
    }


def apply(model: nnx.Module, steps: Sequence[Step]) -> nnx.Module:
    """Changes the layers in place, one after the other."""
    # Tied weights are converted once, under the identity that they had before anything changed.
    shared: dict[int, dict[str, nnx.Variable]] = {}
    keys = [_weight_key(step.site) for step in steps]
    for step, key in zip(steps, keys, strict=True):
        _change(step, shared.setdefault(key, {}))
        # The site and the step must not keep the float weight alive.
        step.site.tensors = {}
        step.floats = step.stored = None
    return model


def unwrap(model: nnx.Module, sites: Sequence[Site]) -> nnx.Module:
    """Makes layers plain again, in the dtypes that they had."""
    shared: dict[int, dict[str, nnx.Variable]] = {}
    for site in sites:
        _make_plain(site, shared.setdefault(_weight_key(site), {}))
        site.tensors = {}
    return model


def _flatten(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
    inside = list(_children(layer))
    if not inside or _variables(layer):
        yield path, layer
    for name, child in inside:
        yield from _flatten(child, f"{path}/{name}" if path else name)


def _children(layer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(layer, nnx.Sequential):
        # Its layers have their positions for names, as in other frameworks.
        for name, value in _items(layer.layers):
            yield from _modules_in(name, value)
        return
    for name, value in _attributes(layer):
        yield from _modules_in(name, value)


def _attributes(node: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(node).items():
        if not str(name).startswith("_pytree__"):
            yield str(name), value


def _modules_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    # nnx.List and nnx.Dict are containers, with no part in the computation.
    if isinstance(value, nnx.Module) and not isinstance(value, (nnx.List, nnx.Dict)):
        yield name, value
    else:
        for key, item in _items(value):
            yield from _modules_in(f"{name}/{key}", item)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, nnx.List)):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, (dict, nnx.Dict)):
        yield from ((str(key), item) for key, item in value.items())


def _variables(layer: Any) -> dict[str, nnx.Variable]:
    """Gives a layer's own variables by attribute; those in containers by `name.key`."""
    return {name: v for key, value in _attributes(layer) for name, v in _variables_in(key, value)}


# A generator, and no function inside `_variables`: one that calls itself would be a cycle, and keep
# the float weights until a garbage collection.
def _variables_in(name: str, value: Any) -> Iterator[tuple[str, nnx.Variable]]:
    if isinstance(value, nnx.Variable):
        # Seeds and counters of random streams are no part of the model's tensors.
        if not isinstance(value, nnx.RngState) and isinstance(value.get_value(), jax.Array):
            yield name, value
    elif not isinstance(value, nnx.Module) or isinstance(value, (nnx.List, nnx.Dict)):
        for key, item in _items(value):
            yield from _variables_in(f"{name}.{key}", item)


def _site(paths: tuple[str, ...], layer: Any, left_out: str) -> Site:
    plain = plain_class(layer)
    wrapping = layer._policy_wrapping if isinstance(layer, PolicyModule) else None
    what = form(layer, plain)
    if wrapping is not None and wrapping.plan.quantized:
        tensors = quantized_tensors(layer)
    else:
        names = FILE_NAMES.get(known_base(plain), {})
        tensors = {}
        for attribute, variable in _variables(layer).items():
            if attribute == what.weight:
                tensors["weight"] = Stored(variable, what.axes)
            else:
                name = names.get(attribute, attribute)
                flat = name == "bias" and what.kind == "linear" and not what.left_out
                tensors[name] = Stored(variable, None, flat)
        # The weight first, as the reference and torch have it.
        order = sorted(tensors, key=lambda name: name != "weight")
        tensors = {name: tensors[name] for name in order}
    spec = _sites.layer_spec(
        paths[0],
        plain.__name__,
        what.kind,
        tensors,
        None if wrapping is None else layer._policy_plain[0],
        what.left_out or left_out,
    )
    return Site(paths=paths, layer=layer, spec=spec, tensors=tensors, wrapping=wrapping)


def _weight_key(site: Site) -> int:
    weight = site.tensors.get("weight")
    return id(site) if weight is None else id(weight.source)


def _change(step: Step, shared: dict[str, nnx.Variable]) -> None:
    site, layer = step.site, step.site.layer
    if step.wrapping is None:
        for name, array in (step.floats or {}).items():
            _write(site, name, jax.numpy.asarray(array))
        return
    plan = step.wrapping.plan
    what = form(layer, plain_class(layer))
    known = {name: variable.get_value() for name, variable in shared.items() if name != "param"}
    new = _sites.made(step, plan, known)
    if site.wrapping is None:
        plain: tuple[Any, ...] = (site.spec.tensors, (), ())
        if what.weight:
            weight = getattr(layer, what.weight)
            plain = (site.spec.tensors, tuple(weight.shape), _metadata(weight))
        _make_wrapped(layer, plain)
    layer._policy_wrapping = step.wrapping
    for spec in plan.storage:
        if spec.name in ("weight", "weight_scale") and plan.quantized and not plan.trainable:
            continue
        if spec.name.endswith(STATE_SUFFIXES) and plan.quantized:
            _set_state(layer, spec, new[spec.name])
        elif spec.name == "weight" and isinstance(site.tensors["weight"].source, Codes):
            _restore(layer, new["weight"], shared)
        else:
            _write(site, spec.name, new[spec.name])
    if plan.quantized and not plan.trainable:
        if "weight" not in shared:
            shared.update({name: Codes(new[name]) for name in ("weight", "weight_scale")})
        if hasattr(layer, what.weight):
            delattr(layer, what.weight)
        layer.weight, layer.weight_scale = shared["weight"], shared["weight_scale"]
    _drop_stale(layer, plan)


def _make_wrapped(layer: Any, plain: tuple[Any, ...]) -> None:
    own: Any = type(layer)
    object.__setattr__(layer, "__class__", wrapped_class(own))
    layer._policy_plain = plain


def _metadata(variable: nnx.Variable) -> tuple[tuple[str, Any], ...]:
    """Gives a Param's class and metadata, hashable, so that it may be part of a graph definition."""
    items = [("", type(variable))]
    for name, value in variable.get_metadata().items():
        try:
            hash(value)
        except TypeError:
            continue
        items.append((name, value))
    return tuple(items)


def _write(site: Site, name: str, array: Array) -> None:
    """Puts a float tensor, in the files' shape, into the variable that holds it."""
    stored = site.tensors[name]
    variable = stored.source
    shape = tuple(variable.get_value().shape)
    value = stored.axes.from_file(SHAPES, array, shape) if stored.axes else array.reshape(shape)
    if value is not variable.get_value():
        variable.set_value(value)


def _set_state(layer: Any, spec: TensorSpec, value: Array) -> None:
    kind = Float8GradientState if spec.name.startswith("output_grad") else Float8State
    before = getattr(layer, spec.name, None)
    if isinstance(before, Float8State):
        before.set_value(value)
    else:
        setattr(layer, spec.name, kind(value))
    if not hasattr(layer, "use_running_average"):
        layer.use_running_average = False


def _drop_stale(layer: Any, plan: Any) -> None:
    """Removes what only an earlier plan needed."""
    kept = {spec.name for spec in plan.storage}
    codes = plan.quantized and not plan.trainable
    for name, value in list(vars(layer).items()):
        unused = isinstance(value, Codes) and not codes
        if unused or (isinstance(value, (Codes, Float8State)) and name not in kept):
            delattr(layer, name)
    if not plan.trainable and known_base(plain_class(layer)) is not nnx.BatchNorm:
        vars(layer).pop("use_running_average", None)


def _restore(layer: Any, weight: Array, shared: dict[str, nnx.Variable]) -> None:
    """Gives a layer its Param back; layers that were tied get one."""
    what = form(layer, plain_class(layer))
    if "param" not in shared:
        _, shape, metadata = layer._policy_plain
        details = dict(metadata)
        kind = details.pop("")
        assert what.axes is not None
        shared["param"] = kind.from_metadata(what.axes.from_file(SHAPES, weight, shape), details)
    setattr(layer, what.weight, shared["param"])


def _make_plain(site: Site, shared: dict[str, nnx.Variable]) -> None:
    layer = site.layer
    for name, array in _sites.plain_tensors(site).items():
        if isinstance(site.tensors[name].source, Codes):
            _restore(layer, array, shared)
        else:
            _write(site, name, array)
    for name, value in list(vars(layer).items()):
        if isinstance(value, (Codes, Float8State)) or name.startswith("_policy_"):
            delattr(layer, name)
    if known_base(plain_class(layer)) is not nnx.BatchNorm:
        vars(layer).pop("use_running_average", None)
    object.__setattr__(layer, "__class__", plain_class(layer))
