"""Walks a model of `policy_numpy` layers, and changes its layers as the core decided."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from policy_core import _scaling
from policy_core._backend import Site, Step
from policy_core._dtypes import shorten, standardize_dtype
from policy_core._plan import STATE_SUFFIXES, LayerSpec, Plan, TensorSpec

from ._kernels import Weight, kernel_table, stored
from ._layers import float_tensor, frozen_weight
from ._models import Dense, Embedding, Layer, LayerNorm
from ._ops import OPS, Array, numpy_dtype
from ._quantize import quantize


def walk(model: Any) -> list[Site]:
    """Gives every leaf layer of a model once, with all its paths."""
    if not isinstance(model, Layer):
        raise TypeError(f"Expected a policy_numpy.Layer. Received: {shorten(model)}")
    paths: dict[int, list[str]] = {}
    layers: dict[int, Layer] = {}
    for path, layer in model.flatten():
        layers[id(layer)] = layer
        paths.setdefault(id(layer), []).append(path)
    kernels = kernel_table()
    return [
        Site(
            paths=tuple(paths[key]),
            layer=layer,
            spec=_spec(paths[key][0], layer, kernels),
            tensors=dict(layer.tensors),
            wrapping=layer.wrapping,
        )
        for key, layer in layers.items()
    ]


def validate(step: Step) -> None:
    """Raises ValueError for a weight that cannot be stored as decided; changes nothing."""
    if step.stored is not None or step.wrapping is None:
        return
    plan = step.wrapping.plan
    for spec in step.site.spec.tensors:
        array = _float(step, spec.name)
        if plan.quantized and spec.name == "weight" and not np.isfinite(_wide(array)).all():
            raise ValueError(
                "The weight holds a NaN or an infinity, which has no code. Repair it first."
            )
        kept = next((t for t in plan.storage if t.name == spec.name), None)
        if kept is None or kept.dtype == spec.dtype or kept.dtype == plan.weight_codes:
            continue
        with np.errstate(over="ignore"):
            cast = _wide(array.astype(numpy_dtype(kept.dtype)))
        if (np.isfinite(_wide(array)) & ~np.isfinite(cast)).any():
            raise ValueError(
                f"{spec.name!r} holds {float(np.abs(_wide(array)).max())}, which {kept.dtype} "
                "cannot hold."
            )


def apply(model: Layer, steps: Sequence[Step]) -> Layer:
    """Changes the layers in place, one after the other."""
    # Tied weights are converted once, under the key that they had before anything changed.
    shared: dict[object, dict[str, Any]] = {}
    keys = {id(step): _weight_key(step.site) for step in steps}
    multiplied = {keys[id(step)] for step in steps if step.site.layer.kind == "linear"}
    for step in steps:
        layer: Layer = step.site.layer
        packed = keys[id(step)] in multiplied
        made = shared.setdefault(keys[id(step)], {})
        if step.wrapping is None:
            tensors = {**layer.tensors, **(step.floats or {})}
        elif step.stored is not None:
            tensors = _from_file(step.stored, step.wrapping.plan, made, packed)
        else:
            tensors = _made(step, step.wrapping.plan, made, packed)
        if layer.wrapping is None:
            layer.plain_specs = step.site.spec.tensors
        layer.tensors = tensors
        layer.wrapping = step.wrapping
        # The site and the step must not keep the float weight alive.
        step.site.tensors = {}
        step.floats = step.stored = None
    return model


def unwrap(model: Layer, sites: Sequence[Site]) -> Layer:
    """Makes layers plain again, in the dtypes that they had."""
    shared: dict[object, Array] = {}
    for site in sites:
        layer: Layer = site.layer
        key = _weight_key(site)
        tensors = {}
        for spec in layer.plain_specs:
            tied = spec.name == "weight"
            array = shared.get(key) if tied else None
            if array is None:
                array = float_tensor(layer, spec.name).astype(numpy_dtype(spec.dtype), copy=False)
            if tied:
                shared[key] = array
            tensors[spec.name] = array
        layer.tensors = tensors
        layer.wrapping = None
        site.tensors = {}
    return model


def _spec(path: str, layer: Layer, kernels: tuple[tuple[str, str, str], ...]) -> LayerSpec:
    specs = layer.plain_specs
    if layer.wrapping is None:
        specs = tuple(
            TensorSpec(name, array.shape, standardize_dtype(array.dtype))
            for name, array in layer.tensors.items()
        )
    return LayerSpec(
        path=path,
        layer_type=type(layer).__name__,
        kind=layer.kind,
        tensors=specs,
        contracted_axes=(1,) if layer.kind in ("linear", "embedding") else (),
        left_out=_reason_against(layer),
        kernels=kernels,
    )


def _reason_against(layer: Layer) -> str:
    for base in (Dense, Embedding, LayerNorm):
        if isinstance(layer, base) and type(layer).compute is not base.compute:
            return f"{type(layer).__name__} overrides compute; it follows the source policy"
    if layer.kind in ("linear", "embedding") and not isinstance(layer, (Dense, Embedding)):
        return f"{type(layer).__name__} is neither a Dense nor an Embedding"
    return ""


def _weight_key(site: Site) -> object:
    weight = site.tensors.get("weight")
    return id(site) if weight is None else storage_key(weight)


def storage_key(array: Weight) -> object:
    """Gives what two arrays have in common exactly if they are the same elements in memory."""
    if not isinstance(array, np.ndarray) or array.size == 0:
        return id(array)
    return (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype)


def _wide(array: Array) -> Array:
    return array if array.dtype.itemsize > 2 else array.astype(np.float32)


def _float(step: Step, name: str) -> Array:
    if step.floats is not None:
        return step.floats[name]
    return float_tensor(step.site.layer, name)


def _from_file(
    arrays: dict[str, Array], plan: Plan, shared: dict[str, Any], packed: bool
) -> dict[str, Any]:
    """Gives the tensors of a file, the codes that are multiplied in the kernels' layout."""
    if not (plan.quantized and not plan.trainable and packed):
        return dict(arrays)
    if "weight" not in shared:
        shared["weight"] = stored(arrays["weight"])
    return {**arrays, "weight": shared["weight"]}


def _made(step: Step, plan: Plan, shared: dict[str, Any], packed: bool) -> dict[str, Any]:
    """Gives the tensors of `plan.storage`, made from the layer's own or from `step.floats`."""
    tensors: dict[str, Any] = {}
    layer: Layer = step.site.layer
    for spec in plan.storage:
        if spec.name in shared:
            tensors[spec.name] = shared[spec.name]
        elif spec.name == "weight" and plan.quantized and not plan.trainable:
            codes, shared["weight_scale"] = _codes(step, plan)
            # An embedding alone reads single rows, which an array gives faster.
            shared["weight"] = stored(codes) if packed else codes
            tensors["weight"] = shared["weight"]
        elif spec.name.endswith(STATE_SUFFIXES):
            tensors[spec.name] = _state_tensor(layer, spec)
        else:
            array = _float(step, spec.name).astype(numpy_dtype(spec.dtype), copy=False)
            tensors[spec.name] = array
            if spec.name == "weight":
                shared["weight"] = array
    return tensors


def _codes(step: Step, plan: Plan) -> tuple[Array, Array]:
    assert plan.weight_codes is not None
    layer: Layer = step.site.layer
    before = layer.wrapping
    if before is not None and before.plan.asked == plan.asked and step.floats is None:
        # Freezing: the codes with which the layer computes outside training.
        return frozen_weight(layer.tensors, before.plan)
    return quantize(_float(step, "weight"), plan.weight_codes, plan.scale_axes)


def _state_tensor(layer: Layer, spec: TensorSpec) -> Array:
    """Gives a state tensor that the layer has already, else one before any training call."""
    own = layer.tensors.get(spec.name)
    if own is not None and own.shape == spec.shape:
        return own
    fresh = _scaling.initial_state(OPS, spec.shape[0] if spec.shape else 1)
    return np.asarray(fresh.amax_history if spec.shape else fresh.scale)
