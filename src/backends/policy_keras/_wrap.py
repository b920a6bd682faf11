"""Changes the layers of a model as the core decided."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from policy_core._backend import Site, Step
from policy_core._plan import Plan, TensorSpec

from . import _containers, _keras, _reversible, _takeover
from ._change import become, plain_again
from ._classes import Wrapped
from ._kernels import FRAMEWORK, PRODUCTS
from ._layers import KeepsCodes, Quantized
from ._stored import SCALE, Stored, state_specs
from ._walk import reason_to_refuse


def storage_key(tensor: Any) -> object:
    """Gives what two tensors have in common exactly if they are the same storage."""
    if isinstance(tensor, Stored):
        return (
            (id(tensor.variable), tensor.part == 0)
            if tensor.part is not None
            else id(tensor.variable)
        )
    return id(tensor) if isinstance(tensor, _keras.KerasVariable) else FRAMEWORK.storage_key(tensor)


def validate(step: Step) -> None:
    """Raises ValueError for what would make `apply` fail; changes nothing."""
    layer = step.site.layer
    reason = reason_to_refuse(layer)
    if not reason and step.wrapping is not None and not isinstance(layer, Wrapped):
        reason = _takeover.reason_against(layer, step.wrapping.plan)
    if reason:
        raise ValueError(reason)
    if step.stored is not None or step.wrapping is None:
        return
    plan = step.wrapping.plan
    for spec in step.site.spec.tensors:
        kept = next((t for t in plan.storage if t.name == spec.name), None)
        codes = plan.quantized and spec.name == "weight"
        same = kept is None or kept.dtype in (spec.dtype, plan.weight_codes)
        if codes and _taken_over(step):
            continue
        if not codes and same:
            continue
        array = FRAMEWORK.to_numpy(_float(step, spec.name))
        wide = array if array.dtype.itemsize > 2 else array.astype(np.float32)
        if codes and not np.isfinite(wide).all():
            raise ValueError(
                "The weight holds a NaN or an infinity, which has no code. Repair it first."
            )
        if same:
            continue
        assert kept is not None
        with np.errstate(over="ignore"):
            cast = wide.astype(_numpy_dtype(kept.dtype)).astype(np.float64)
        if (np.isfinite(wide) & ~np.isfinite(cast)).any():
            raise ValueError(
                f"{spec.name!r} holds {float(np.abs(wide).max())}, which {kept.dtype} cannot hold."
            )


def apply(model: Any, steps: Sequence[Step]) -> Any:
    """Wraps, or wraps anew, one layer after the other, freeing each float weight at once."""
    _check_halves(steps)
    shared: dict[object, dict[str, Any]] = {}
    keys = [_weight_key(step.site) for step in steps]
    holders = _containers.holders(model)
    for step, key in zip(steps, keys, strict=True):
        site, layer = step.site, step.site.layer
        tied = shared.setdefault(key, {})
        if step.wrapping is None:
            _overwrite(site, step.floats or {})
        else:
            tensors = _made(step, step.wrapping.plan, tied)
            site.tensors = {}
            written = step.floats is not None or step.stored is not None
            step.floats = step.stored = None
            become(layer, step.wrapping, site.spec.tensors, tensors, tied, written)
        site.tensors = {}
        _containers.forget(holders, layer)
    _containers.settle(model)
    return model


def _check_halves(steps: Sequence[Step]) -> None:
    """Refuses to wrap one of an untied ReversibleEmbedding's two tables, and leave one plain."""
    wrapped = {id(step.site.layer): step.wrapping is not None for step in steps}
    for step in steps:
        owner = _reversible.owner_of(step.site.layer)
        if owner is None or isinstance(owner, Wrapped):
            continue
        if wrapped[id(step.site.layer)] != wrapped.get(id(owner), False):
            path = step.site.path
            raise ValueError(
                f"{path!r} and the layer that it is inside must both have a policy, or neither; "
                "'float32' is one."
            )


def unwrap(model: Any, sites: Sequence[Site]) -> Any:
    """Makes layers plain again, dequantized where the float weight is gone."""
    shared: dict[object, dict[str, Any]] = {}
    keys = [_weight_key(site) for site in sites]
    for site, key in zip(sites, keys, strict=True):
        layer = site.layer
        step = Step(site=site, wrapping=None)
        tied = shared.setdefault(key, {})
        weight = None
        if isinstance(layer, KeepsCodes) and "kernel" not in tied:
            weight = _float(step, "weight")
        site.tensors = {}
        plain_again(layer, weight, tied)
        _reversible.take_out(layer)
    _containers.settle(model, [site.layer for site in sites])
    return model


def _overwrite(site: Site, floats: dict[str, Any]) -> None:
    """Gives a plain layer other floats."""
    for name, array in floats.items():
        site.tensors[name].write(FRAMEWORK.from_numpy(array))


def _made(step: Step, plan: Plan, tied: dict[str, Any]) -> dict[str, Any]:
    """Gives the tensors of `plan.storage` in the files' shapes: those there, made, or from a file."""
    if step.stored is not None:
        return {name: FRAMEWORK.from_numpy(array) for name, array in step.stored.items()}
    layer = step.site.layer
    tensors: dict[str, Any] = {}
    states = state_specs(plan)
    for spec in plan.storage:
        codes_only = plan.quantized and not plan.trainable
        if codes_only and spec.name in ("weight", SCALE):
            if "codes" not in tied and spec.name == "weight":
                tensors["weight"], tensors[SCALE] = _codes(step, plan)
        elif plan.quantized and spec in states:
            tensors[spec.name] = _state(step, spec)
        elif step.floats is not None or (spec.name == "weight" and _has_codes(layer)):
            if not (spec.name == "weight" and "kernel" in tied):
                tensors[spec.name] = _float(step, spec.name)
            else:
                tensors[spec.name] = None
    return tensors


def _has_codes(layer: Any) -> bool:
    if isinstance(layer, Wrapped):
        return isinstance(layer, KeepsCodes)
    return _takeover.mode_of(layer) == "int8"


def _taken_over(step: Step) -> bool:
    layer = step.site.layer
    return (
        step.floats is None
        and not isinstance(layer, Wrapped)
        and _takeover.mode_of(layer) == "int8"
    )


def _float(step: Step, name: str) -> Any:
    if step.floats is not None:
        return FRAMEWORK.from_numpy(step.floats[name])
    site = step.site
    stored = site.tensors[name]
    if name == "weight" and isinstance(site.layer, KeepsCodes):
        dtype = next(spec.dtype for spec in site.spec.tensors if spec.name == name)
        return FRAMEWORK.dequantize(stored.read(), site.tensors[SCALE].read(), dtype)
    if name == "weight" and _taken_over(step):
        return _takeover.float_weight(site.layer, stored)
    return ops.stop_gradient(stored.read())


def _codes(step: Step, plan: Plan) -> tuple[Any, Any]:
    assert plan.weight_codes is not None
    site = step.site
    if _taken_over(step):
        return site.tensors["weight"].read(), _takeover.scale_of(site.layer)
    before = None if site.wrapping is None else site.wrapping.plan
    if before is not None and before.asked == plan.asked and step.floats is None:
        # Freezing: the codes with which the layer computes outside training.
        return PRODUCTS.frozen_weight(before, {n: t.read() for n, t in site.tensors.items()})
    return FRAMEWORK.quantize(_float(step, "weight"), plan.weight_codes, plan.scale_axes)


def _state(step: Step, spec: TensorSpec) -> Any:
    """Gives a state tensor that the layer has already, else one before any training call."""
    site = step.site
    own = site.tensors.get(spec.name)
    if own is not None and own.shape == spec.shape and isinstance(site.layer, Quantized):
        return ops.stop_gradient(own.read())
    if not isinstance(site.layer, Wrapped):
        taken = _takeover.state_of(site.layer, spec)
        if taken is not None:
            return taken
    return FRAMEWORK.from_numpy(np.full(spec.shape, 0.0 if spec.shape else 1.0, np.float32))


def _weight_key(site: Site) -> object:
    weight = site.tensors.get("weight")
    return id(site) if weight is None else (id(weight.variable), weight.axes)


def _numpy_dtype(name: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
