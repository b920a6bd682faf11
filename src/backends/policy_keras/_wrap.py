"""Changes the layers of a model as the core decided."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from policy_core._backend import Site, Step, Wrapping
from policy_core._dtypes import is_castable_float
from policy_core._plan import Plan, TensorSpec

from . import _containers, _keras, _takeover
from ._adapters import adapter_for, form_of
from ._classes import Wrapped, base_class, wrapped_class
from ._kernels import CODES, FRAMEWORK, PACKED, PRODUCTS
from ._layers import KeepsCodes, Quantized, mixin_for
from ._policies import as_keras
from ._stored import GRADIENT_STATE, SCALE, Stored, float_tensors, quantized_tensors, state_specs
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
        _plain_again(layer, weight, tied)
    _containers.settle(model, [site.layer for site in sites])
    return model


def become(
    layer: Any,
    wrapping: Wrapping,
    plain: tuple[TensorSpec, ...],
    tensors: dict[str, Any],
    tied: dict[str, Any],
    written: bool,
) -> None:
    """Gives a layer its wrapped class, and the tensors of its plan.

    Args:
        layer: The layer, wrapped or not.
        wrapping: What was decided.
        plain: What its tensors are when it is plain.
        tensors: Those of the plan's storage, by name, in the files' shapes; floats that stay as
            they are may be left out.
        tied: What was made for layers with the same weight.
        written: Whether float tensors are new, and not those that the layer has.
    """
    plan, base = wrapping.plan, base_class(layer)
    adapter = adapter_for(base)
    mixin = mixin_for(plan, adapter)
    fields = vars(layer)
    if not isinstance(layer, Wrapped):
        _remember(layer, adapter, plain)
    form = form_of(layer, adapter) if plan.quantized else None
    own = _variables_of(layer)
    if _takeover.mode_of(layer) is not None and not isinstance(layer, Wrapped):
        _takeover.drop(layer)
    if issubclass(mixin, KeepsCodes):
        for name in own:
            _keras.drop_attribute(layer, name)
        _keras.drop_attribute(layer, adapter.weight)
        _put_codes(layer, plan, tensors, tied)
    else:
        for name in own:
            _keras.drop_attribute(layer, name)
        if adapter.weight and _is_codes(fields.get(adapter.weight)):
            _keras.drop_attribute(layer, adapter.weight)
        if adapter.weight and adapter.weight not in fields:
            _put_weight(layer, adapter, tensors["weight"], tied)
    object.__setattr__(layer, "__class__", wrapped_class(mixin, base))
    fields.update(
        _policy_wrapping=wrapping,
        _policy_form=form,
        _dtype_policy=as_keras(plan.policy),
    )
    if plan.quantized:
        fields["_is_quantized"] = True
    else:
        fields.pop("_is_quantized", None)
    if plan.quantized:
        _put_states(layer, plan, tensors)
    _recast(layer, adapter, plan, plain, tensors if written else {})
    _keras.refresh_signature(layer)


def _remember(layer: Any, adapter: Any, plain: tuple[TensorSpec, ...]) -> None:
    """Keeps what `unwrap` needs to make the layer plain again."""
    import copy

    fields = vars(layer)
    fields["_policy_plain"] = plain
    fields["_policy_plain_dtype"] = _takeover.plain_policy(layer)
    weight = fields.get(adapter.weight)
    if weight is not None:
        fields["_policy_kernel_shape"] = tuple(weight.shape)
        stem = adapter.weight.lstrip("_")
        fields["_policy_weight_traits"] = {
            "name": weight.name,
            "trainable": weight.trainable or _is_codes(weight),
            "regularizer": getattr(weight, "regularizer", None)
            or copy.copy(getattr(layer, f"{stem}_regularizer", None)),
            "constraint": getattr(weight, "constraint", None)
            or copy.copy(getattr(layer, f"{stem}_constraint", None)),
        }


def _put_codes(layer: Any, plan: Plan, tensors: dict[str, Any], tied: dict[str, Any]) -> None:
    if "codes" not in tied:
        codes = tensors.pop("weight")
        multiplies = adapter_for(base_class(layer)).kind != "embedding"
        name, value = PRODUCTS.store(codes, plan, multiplies)
        tied["codes"] = (name, _keras.new_variable(layer, name, value))
        tied["scale"] = _keras.new_variable(layer, SCALE, tensors.pop(SCALE))
    name, variable = tied["codes"]
    _keras.add_variable(layer, name, variable)
    _keras.add_variable(layer, SCALE, tied["scale"])


def _put_weight(layer: Any, adapter: Any, weight: Any, tied: dict[str, Any]) -> None:
    """Gives a layer a float weight again, first among its variables."""
    traits = vars(layer)["_policy_weight_traits"]
    if "kernel" not in tied:
        shape = vars(layer)["_policy_kernel_shape"]
        options = {"trainable": traits["trainable"], "name": traits["name"]}
        with layer._open_name_scope():
            form = form_of(layer, adapter)
            if form is not None:
                weight = form.axes.from_file(weight, shape)
            dtype = keras.backend.standardize_dtype(weight.dtype)
            variable = keras.Variable(weight, dtype=dtype, **options)
        variable.regularizer, variable.constraint = traits["regularizer"], traits["constraint"]
        tied["kernel"] = variable
    _keras.add_variable(layer, adapter.weight, tied["kernel"])
    variables = layer._trainable_variables
    if variables and variables[-1] is tied["kernel"]:
        variables.insert(0, variables.pop())


def _put_states(layer: Any, plan: Plan, tensors: dict[str, Any]) -> None:
    states = {spec.name: tensors[spec.name] for spec in state_specs(plan)}
    scale, history = states.get("output_grad_scale"), states.get("output_grad_amax_history")
    if scale is not None and history is not None:
        joined = ops.concatenate([ops.reshape(scale, (1,)), history])
        variable = PRODUCTS.gradient_state(layer, GRADIENT_STATE, joined)
        if variable is not None:
            _keras.add_variable(layer, GRADIENT_STATE, variable)
            del states["output_grad_scale"], states["output_grad_amax_history"]
    for name, value in states.items():
        _keras.add_variable(layer, name, _keras.new_variable(layer, name, value))


def _recast(
    layer: Any, adapter: Any, plan: Plan, plain: tuple[TensorSpec, ...], values: dict[str, Any]
) -> None:
    """Gives the float variables the dtypes of the plan, and new values where there are any."""
    wanted = {spec.name: spec.dtype for spec in plan.storage}
    names = {spec.name for spec in plain}
    for name, stored in _floats_of(layer, adapter).items():
        if name not in names or name not in wanted:
            continue
        if is_castable_float(wanted[name]):
            _keras.recast(stored.variable, wanted[name])
        if name in values:
            stored.write(values[name])


def _floats_of(layer: Any, adapter: Any) -> dict[str, Stored]:
    if not isinstance(layer, Quantized):
        return float_tensors(layer, adapter)
    own, plan = quantized_tensors(layer), layer.policy_plan
    others = {spec.name for spec in state_specs(plan)}
    if not plan.trainable:
        others |= {"weight", SCALE}
    return {name: stored for name, stored in own.items() if name not in others}


def _variables_of(layer: Any) -> set[str]:
    """Gives the attributes of the variables that quantization gives a layer."""
    names = {PACKED, CODES, SCALE, GRADIENT_STATE}
    if isinstance(layer, Quantized):
        names |= {spec.name for spec in state_specs(layer.policy_plan)}
    return names


def _plain_again(layer: Any, weight: Any, tied: dict[str, Any]) -> None:
    adapter, fields = layer._policy_adapter, vars(layer)
    plain = layer._policy_plain
    if isinstance(layer, Quantized):
        for name in _variables_of(layer):
            _keras.drop_attribute(layer, name)
        if adapter.weight not in fields:
            _put_weight(layer, adapter, weight, tied)
    object.__setattr__(layer, "__class__", layer._policy_base)
    fields["_dtype_policy"] = fields["_policy_plain_dtype"]
    for name in [n for n in fields if n.startswith("_policy_")] + ["_is_quantized"]:
        fields.pop(name, None)
    dtypes = {spec.name: spec.dtype for spec in plain}
    for name, stored in float_tensors(layer, adapter).items():
        if is_castable_float(dtypes.get(name, "bool")):
            _keras.recast(stored.variable, dtypes[name])
    _keras.refresh_signature(layer)


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


def _is_codes(variable: Any) -> bool:
    return variable is not None and not is_castable_float(variable._dtype)


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
