"""Gives one layer its wrapped form and the variables of its plan, or its plain form again."""

import copy
from typing import Any

import keras
from keras import ops

from policy_core._backend import Wrapping
from policy_core._dtypes import is_castable_float
from policy_core._forms import OUT_IN, Axes
from policy_core._plan import Plan, TensorSpec

from . import _containers, _keras, _reversible, _takeover
from ._adapters import UNTIED, form_of
from ._classes import Wrapped, adapter_of, base_class, wrapped_class
from ._kernels import CODES, PACKED, PRODUCTS
from ._layers import FloatLayer, KeepsCodes, Quantized, mixin_for
from ._policies import as_keras
from ._stored import GRADIENT_STATE, SCALE, Stored, float_tensors, quantized_tensors, state_specs


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
    adapter = adapter_of(layer)
    mixin = mixin_for(plan, adapter)
    if adapter is UNTIED:
        mixin = _containers.REVERSIBLE[mixin]
    elif mixin is FloatLayer and _keras.sublayers(layer):
        mixin = _containers.Holder
    _reversible.put_inside(layer)
    fields = vars(layer)
    if not isinstance(layer, Wrapped):
        _remember(layer, adapter, plain)
    form = form_of(layer, adapter) if plan.quantized else None
    if _takeover.mode_of(layer) is not None and not isinstance(layer, Wrapped):
        _takeover.drop(layer)
    for name in _variables_of(layer):
        _keras.drop_attribute(layer, name)
    codes_only = issubclass(mixin, KeepsCodes)
    if codes_only or _is_codes(fields.get(adapter.weight)):
        _keras.drop_attribute(layer, adapter.weight)
    if codes_only:
        _put_codes(layer, plan, OUT_IN if form is None else form.axes, tensors, tied)
    elif adapter.weight and adapter.weight not in fields:
        _put_weight(layer, adapter, tensors["weight"], tied)
    object.__setattr__(layer, "__class__", wrapped_class(mixin, base))
    fields.update(
        _policy_adapter=adapter,
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
            "place": PRODUCTS.place_of(weight),
            "regularizer": getattr(weight, "regularizer", None)
            or copy.copy(getattr(layer, f"{stem}_regularizer", None)),
            "constraint": getattr(weight, "constraint", None)
            or copy.copy(getattr(layer, f"{stem}_constraint", None)),
        }


def _new_variable(layer: Any, name: str, value: Any, axes: Axes | None = None) -> Any:
    """Gives a variable where the layer's weight is, or was; `axes` as for `Products.layout`."""
    place = vars(layer)["_policy_weight_traits"]["place"]
    with PRODUCTS.made_at(place):
        layout = PRODUCTS.layout(place, tuple(value.shape), axes)
        return _keras.new_variable(layer, name, value, layout)


def _put_codes(
    layer: Any, plan: Plan, axes: Axes, tensors: dict[str, Any], tied: dict[str, Any]
) -> None:
    if "codes" not in tied:
        codes = tensors.pop("weight")
        multiplies = adapter_of(layer).kind != "embedding"
        name, value = PRODUCTS.store(codes, plan, multiplies)
        tied["codes"] = (name, _new_variable(layer, name, value, axes))
        tied["scale"] = _new_variable(layer, SCALE, tensors.pop(SCALE), axes)
    name, variable = tied["codes"]
    _keras.add_variable(layer, name, variable)
    _keras.add_variable(layer, SCALE, tied["scale"])


def _put_weight(layer: Any, adapter: Any, weight: Any, tied: dict[str, Any]) -> None:
    """Gives a layer a float weight again, first among its variables."""
    traits = vars(layer)["_policy_weight_traits"]
    if "kernel" not in tied:
        shape = vars(layer)["_policy_kernel_shape"]
        place = traits["place"]
        options = {"trainable": traits["trainable"], "name": traits["name"]}
        options["layout"] = PRODUCTS.layout(place)
        with PRODUCTS.made_at(place), layer._open_name_scope():
            form = form_of(layer, adapter)
            if form is not None:
                weight = form.axes.from_file(keras.ops, weight, shape)
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
        place = vars(layer)["_policy_weight_traits"]["place"]
        layout = PRODUCTS.layout(place, tuple(joined.shape), None)
        variable = PRODUCTS.gradient_state(layer, GRADIENT_STATE, joined, layout)
        if variable is not None:
            _keras.add_variable(layer, GRADIENT_STATE, variable)
            del states["output_grad_scale"], states["output_grad_amax_history"]
    for name, value in states.items():
        _keras.add_variable(layer, name, _new_variable(layer, name, value))


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
            _recast_one(stored.variable, wanted[name])
        if name in values:
            stored.write(values[name])


def _recast_one(variable: Any, dtype: str) -> None:
    with PRODUCTS.made_at(PRODUCTS.place_of(variable)):
        _keras.recast(variable, dtype)


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


def plain_again(layer: Any, weight: Any, tied: dict[str, Any]) -> None:
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
            _recast_one(stored.variable, dtypes[name])
    _keras.refresh_signature(layer)


def _is_codes(variable: Any) -> bool:
    return variable is not None and not is_castable_float(variable._dtype)
