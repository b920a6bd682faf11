"""Walks flax linen's (module, variables), and gives a new pair as the core decided.

The module says how to compute, and nothing about its parameters before it is called; the variables
say what there is. So layers are found in the variables, and what kind each is follows from its
parameters' names and shapes; the call checks it against the module that really runs there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from flax.core import FrozenDict, unfreeze
from flax.core.meta import AxisMetadata

from policy_core._backend import Site, Step
from policy_core._forms import OUT_IN, Axes
from policy_core._plan import STATE_SUFFIXES

from . import _sites
from ._linen_layers import FLOAT8, QUANTIZED, LinenLayer, PolicyLinen
from ._nnx_forms import Form
from ._ops import SHAPES, Array
from ._sites import Stored

_NORM_NAMES = {"scale": "weight", "mean": "running_mean", "var": "running_var"}
_TYPES = {"linear": "Dense", "embedding": "Embed", "norm": "Norm", "other": "Module"}


def walk(pair: tuple[Any, Any]) -> list[Site]:
    """Gives every set of parameters once, with all its paths, as a layer."""
    module, variables = pair
    if isinstance(variables, FrozenDict):
        variables = unfreeze(variables)
    boxed = _boxed(variables, "")
    if boxed:
        raise TypeError(
            f"The variable {boxed!r} is in a box of metadata. Take it out first: pc.wrap((module, "
            "flax.linen.unbox(variables)), policy)."
        )
    layers = module.table if isinstance(module, PolicyLinen) else {}
    paths: dict[int, list[str]] = {}
    nodes: dict[int, dict[str, Any]] = {}
    for path, node in _flatten(variables.get("params", {}), "", layers):
        paths.setdefault(id(node), []).append(path)
        nodes[id(node)] = node
    return [_site(variables, tuple(paths[key]), node, layers) for key, node in nodes.items()]


def _boxed(node: Any, path: str) -> str:
    """Gives the path of a variable that is in a box, as `nn.with_partitioning` makes them; or `""`."""
    if isinstance(node, AxisMetadata):
        return path
    items = node.items() if hasattr(node, "items") else ()
    found = (_boxed(value, f"{path}/{key}" if path else str(key)) for key, value in items)
    return next(filter(None, found), "")


def apply(pair: tuple[Any, Any], steps: Sequence[Step]) -> tuple[Any, Any]:
    """Gives a new pair; parameters that were shared stay shared."""
    module, variables = pair
    table = dict(module.table) if isinstance(module, PolicyLinen) else {}
    variables = _copy(variables)
    shared: dict[int, dict[str, Array]] = {}
    for step in steps:
        site = step.site
        weight = site.tensors.get("weight")
        known = shared.setdefault(id(site if weight is None else weight.source), {})
        tensors = _made(step, known)
        layer = _layer(step)
        if layer is not None:
            table.update(dict.fromkeys(site.paths, layer))
        _write(variables, site, layer, tensors)
    plain = module.module if isinstance(module, PolicyLinen) else module
    return PolicyLinen(plain, table) if table else plain, variables


def unwrap(pair: tuple[Any, Any], sites: Sequence[Site]) -> tuple[Any, Any]:
    """Gives a new pair of a plain module and float variables, in the dtypes that they had."""
    module, variables = pair
    variables = _copy(variables)
    shared: dict[int, dict[str, Array]] = {}
    for site in sites:
        weight = site.tensors.get("weight")
        known = shared.setdefault(id(site if weight is None else weight.source), {})
        tensors = {**_sites.plain_tensors(site), **known}
        known.update({name: tensors[name] for name in ("weight",) if name in tensors})
        _write(variables, site, None, tensors)
    for collection in (QUANTIZED, FLOAT8):
        variables.pop(collection, None)
    return module.module if isinstance(module, PolicyLinen) else module, variables


def _copy(tree: Any) -> Any:
    """Copies the dicts of a tree, frozen ones thawed; those that are one object into one."""
    # A FrozenDict makes a new one of each that is inside whenever it is asked.
    tree = unfreeze(tree) if isinstance(tree, FrozenDict) else tree
    return _copied(tree, {})


def _copied(node: Any, done: dict[int, Any]) -> Any:
    if not isinstance(node, dict):
        return node
    if id(node) not in done:
        done[id(node)] = {key: _copied(value, done) for key, value in node.items()}
    return done[id(node)]


def _flatten(node: Any, path: str, layers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    inside = {key: value for key, value in node.items() if hasattr(value, "items")}
    if len(inside) < len(node) or path in layers:
        yield path, node
    for key, value in inside.items():
        yield from _flatten(value, f"{path}/{key}" if path else str(key), layers)


def _at(tree: Any, path: str) -> Any:
    """Gives the node at a path; an empty one where there is none."""
    for part in path.split("/") if path else ():
        tree = tree.get(part, {})
    return tree


def _make_at(tree: dict[str, Any], path: str) -> dict[str, Any]:
    for part in path.split("/") if path else ():
        tree = tree.setdefault(part, {})
    return tree


def _drop_at(tree: dict[str, Any], path: str) -> None:
    parts = path.split("/") if path else []
    for depth in range(len(parts), 0, -1):
        parent = _at(tree, "/".join(parts[: depth - 1]))
        if not isinstance(parent.get(parts[depth - 1]), dict) or depth == len(parts):
            parent.pop(parts[depth - 1], None)
        elif not parent[parts[depth - 1]]:
            del parent[parts[depth - 1]]


def _arrays(node: Any) -> dict[str, Any]:
    return {name: value for name, value in node.items() if not hasattr(value, "items")}


def _site(variables: Any, paths: tuple[str, ...], node: Any, layers: dict[str, LinenLayer]) -> Site:
    path = paths[0]
    layer = layers.get(path)
    above, _, last = path.rpartition("/")
    parent = _at(variables["params"], above) if path else {}
    own = _arrays(node)
    what = form(last, own, parent) if layer is None else layer.form
    # Norms of weights, siblings of their layer, name what they keep by the layer's parameters.
    norms = [*parent.values(), *_at(variables.get("batch_stats", {}), above).values()]
    if what.kind == "linear" and any(
        str(key).startswith(f"{last}/") for norm in norms if hasattr(norm, "items") for key in norm
    ):
        what = Form("linear", left_out="a norm of weights computes its kernel anew at each call")
    statistics = _arrays(_at(variables.get("batch_stats", {}), path))
    tensors: dict[str, Stored] = {}
    plan = None if layer is None else layer.wrapping.plan
    if plan is not None and plan.quantized:
        found = {
            **_arrays(_at(variables.get(QUANTIZED, {}), path)),
            **_arrays(_at(variables.get(FLOAT8, {}), path)),
        }
        for kept in plan.storage:
            if kept.name in found:
                tensors[kept.name] = Stored(found[kept.name], codes=kept)
            elif kept.name == "weight":
                tensors["weight"] = Stored(own[what.weight], what.axes)
            else:
                tensors[kept.name] = Stored(own[kept.name], None, True)
    else:
        for name, array in {**own, **statistics}.items():
            if name == what.weight:
                tensors["weight"] = Stored(array, what.axes)
            elif what.kind == "norm":
                tensors[_NORM_NAMES.get(name, name)] = Stored(array)
            else:
                flat = name == "bias" and what.kind == "linear" and not what.left_out
                tensors[name] = Stored(array, None, flat)
        order = sorted(tensors, key=lambda name: name != "weight")
        tensors = {name: tensors[name] for name in order}
    specs = None if layer is None else layer.plain
    spec = _sites.layer_spec(path, _TYPES[what.kind], what.kind, tensors, specs, what.left_out)
    wrapping = None if layer is None else layer.wrapping
    return Site(paths=paths, layer=layer, spec=spec, tensors=tensors, wrapping=wrapping)


def form(name: str, arrays: dict[str, Any], siblings: Any) -> Form:
    """Gives what a set of parameters belongs to, from its names and shapes.

    Args:
        name: The layer's own name.
        arrays: Its parameters.
        siblings: What its parent holds, this layer included.
    """
    names = set(arrays)
    if names == {"embedding"} and jnp.ndim(arrays["embedding"]) == 2:
        return Form("embedding", "embedding", OUT_IN)
    if "scale" in names and names <= {"scale", "bias"}:
        return Form("norm")
    if "kernel" not in names or not names <= {"kernel", "bias"}:
        return Form()
    shape, bias = jnp.shape(arrays["kernel"]), arrays.get("bias")
    contracted = None
    if bias is not None:
        n = jnp.ndim(bias)
        contracted = len(shape) - n if n and shape[-n:] == jnp.shape(bias) else None
    elif len(shape) == 2:
        contracted = 1
    elif {"query", "key", "value", "out"} <= set(siblings):
        contracted = len(shape) - 1 if name == "out" else 1
    elif len(shape) >= 4:
        contracted = len(shape) - 1  # a convolution
    if not contracted:
        reason = (
            f"the shape {shape} of its kernel does not tell which axes are contracted, or it is "
            "of layers that nn.scan or nn.vmap stacked"
        )
        return Form("linear", left_out=reason)
    axes = Axes(tuple(range(contracted, len(shape))), tuple(range(contracted)))
    return Form("linear", "kernel", axes)


def _layer(step: Step) -> LinenLayer | None:
    site = step.site
    if step.wrapping is None:
        return None
    if site.layer is not None:
        before: LinenLayer = site.layer
        return LinenLayer(step.wrapping, before.form, before.plain, before.shape)
    weight = site.tensors.get("weight")
    kind = site.spec.kind
    if kind == "linear" and not site.spec.left_out:
        what = Form("linear", "kernel", site.tensors["weight"].axes)
    elif kind == "embedding":
        what = Form("embedding", "embedding", OUT_IN)
    else:
        what = Form(kind, left_out=site.spec.left_out)
    shape = () if weight is None else tuple(weight.array.shape)
    return LinenLayer(step.wrapping, what, site.spec.tensors, shape)


def _made(step: Step, shared: dict[str, Array]) -> dict[str, Array]:
    if step.wrapping is None:
        return {name: jnp.asarray(array) for name, array in (step.floats or {}).items()}
    plan = step.wrapping.plan
    new = _sites.made(step, plan, shared)
    if plan.quantized:
        names = ("weight",) if plan.trainable else ("weight", "weight_scale")
        shared.update({name: new[name] for name in names})
    return new


def _write(
    variables: dict[str, Any], site: Site, layer: LinenLayer | None, tensors: dict[str, Array]
) -> None:
    """Puts a layer's tensors, given in the files' shapes, where linen has them."""
    plan = None if layer is None else layer.wrapping.plan
    codes = plan is not None and plan.quantized and not plan.trainable
    before: LinenLayer | None = site.layer
    what = layer.form if layer is not None else None
    if what is None:
        what = before.form if before is not None else _plain_form(site)
    for path in site.paths:
        for collection in (QUANTIZED, FLOAT8):
            if collection in variables:
                _drop_at(variables[collection], path)
        node = _at(variables["params"], path)
        for name, array in tensors.items():
            if plan is not None and plan.quantized and name.endswith(STATE_SUFFIXES):
                of_codes = name == "weight_scale" and codes
                target = _make_at(variables.setdefault(QUANTIZED if of_codes else FLOAT8, {}), path)
                target[name] = array
            elif name == "weight" and codes:
                _make_at(variables.setdefault(QUANTIZED, {}), path)[name] = array
                node.pop(what.weight, None)
            else:
                _write_float(variables, path, site, what, name, array)


def _plain_form(site: Site) -> Form:
    kind = site.spec.kind
    if kind == "linear" and not site.spec.left_out:
        return Form("linear", "kernel", site.tensors["weight"].axes)
    return Form("embedding", "embedding", OUT_IN) if kind == "embedding" else Form(kind)


def _write_float(
    variables: dict[str, Any], path: str, site: Site, what: Form, name: str, array: Array
) -> None:
    if name == "weight" and what.weight:
        before: LinenLayer | None = site.layer
        stored = site.tensors["weight"]
        shape = before.shape if before is not None and before.shape else stored.array.shape
        node = _at(variables["params"], path)
        assert what.axes is not None
        node[what.weight] = what.axes.from_file(SHAPES, array, tuple(shape))
        return
    native = {file: own for own, file in _NORM_NAMES.items()} if what.kind == "norm" else {}
    own = native.get(name, name)
    statistics = name in ("running_mean", "running_var")
    node = _at(variables["batch_stats" if statistics else "params"], path)
    node[own] = array.reshape(jnp.shape(node[own]))
