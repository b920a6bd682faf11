"""Parameters in a plain pytree: rules by path, quantized arrays in the place of weights."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import policy_core as pc
from policy_core._backend import Site, Step
from policy_core._forms import Axes
from policy_core._plan import LayerKind

from . import _sites
from ._arrays import QuantizedArray
from ._casting import from_numpy
from ._ops import SHAPES
from ._sites import Stored


class Parameters:
    """A pytree of parameters as a model that `pc.wrap`, `pc.report` and `pc.save` take.

    Attributes:
        tree: The pytree; each of its arrays is a layer, by its place. numpy's become JAX's; PRNG
            keys, and what is no array, are parts that nothing changes.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = jax.tree.map(_as_jax, tree, is_leaf=_is_leaf)


def quantize(params: Any, rules: Any, **options: Any) -> Any:
    """Gives a pytree whose weights are quantized arrays.

    An array of two axes is a weight of `x @ w`, of shape (in, out). All others follow the source
    policy; for weights of more axes there is `quantize_array`.

    Args:
        params: A pytree of arrays.
        rules: What `pc.wrap` takes: a policy, a map, or rules by path, such as `layers/0/w`.
        options: `pc.wrap`'s.

    Raises:
        UnmatchedRuleError: A rule matches no array.
        LayerError, NoKernelError, ValueError: As `pc.wrap`.

    >>> params = quantize({"w": jnp.ones((8, 4))}, "int8_from_float32")
    >>> (jnp.ones((2, 8)) @ params["w"]).shape
    (2, 4)
    """
    return pc.wrap(Parameters(params), rules, **options).tree


def _as_jax(leaf: Any) -> Any:
    numbers = isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.number)
    return from_numpy(leaf) if numbers else leaf


def _is_parameter(leaf: Any) -> bool:
    if isinstance(leaf, QuantizedArray):
        return True
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, QuantizedArray)


def _flatten(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return list(zip(paths, [leaf for _, leaf in leaves], strict=True)), structure


def walk(model: Parameters) -> list[Site]:
    """Gives every array once, with all its paths."""
    paths: dict[int, list[str]] = {}
    leaves: dict[int, Any] = {}
    for path, leaf in _flatten(model.tree)[0]:
        if _is_parameter(leaf):
            leaves[id(leaf)] = leaf
            paths.setdefault(id(leaf), []).append(path)
    return [_site(tuple(paths[key]), leaf) for key, leaf in leaves.items()]


def apply(model: Parameters, steps: Sequence[Step]) -> Parameters:
    """Gives new parameters."""
    return _replaced(model, {id(step.site.layer): _changed(step) for step in steps})


def unwrap(model: Parameters, sites: Sequence[Site]) -> Parameters:
    """Gives parameters of float arrays."""
    return _replaced(model, {id(site.layer): _plain(site) for site in sites})


def _replaced(model: Parameters, new: dict[int, Any]) -> Parameters:
    leaves, structure = _flatten(model.tree)
    changed = [new.get(id(leaf), leaf) for _, leaf in leaves]
    return Parameters(jax.tree_util.tree_unflatten(structure, changed))


def _site(paths: tuple[str, ...], leaf: Any) -> Site:
    if isinstance(leaf, QuantizedArray):
        made = leaf.wrapping.plan
        tensors = {s.name: Stored(leaf.tensors[s.name], codes=s) for s in made.storage}
        plain = _sites.weight_spec(tensors["weight"].shape, made.variable_dtype)
        spec = _sites.layer_spec(paths[0], "Array", "linear", tensors, plain, "")
        return Site(paths=paths, layer=leaf, spec=spec, tensors=tensors, wrapping=leaf.wrapping)
    kind: LayerKind = (
        "linear" if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.floating) else "other"
    )
    axes = Axes((1,), (0,)) if kind == "linear" else None
    left_out = "" if kind == "linear" else "only an array of two axes is a weight of x @ w"
    tensors = {"weight": Stored(leaf, axes)}
    spec = _sites.layer_spec(paths[0], "Array", kind, tensors, None, left_out)
    return Site(paths=paths, layer=leaf, spec=spec, tensors=tensors)


def _changed(step: Step) -> Any:
    site = step.site
    leaf = site.layer
    axes = leaf.axes if isinstance(leaf, QuantizedArray) else site.tensors["weight"].axes
    shape = tuple(leaf.shape)
    if step.wrapping is None:
        made = {name: jnp.asarray(array) for name, array in (step.floats or {}).items()}
    else:
        made = _sites.made(step, step.wrapping.plan)
        if step.wrapping.plan.quantized:
            return QuantizedArray(made, axes, shape, step.wrapping)
    weight = made.get("weight", leaf)
    return axes.from_file(SHAPES, weight, shape) if axes is not None else weight


def _plain(site: Site) -> Any:
    leaf = site.layer
    return leaf.axes.from_file(SHAPES, _sites.plain_tensors(site)["weight"], leaf.shape)
