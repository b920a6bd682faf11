"""Changes the modules of a tree as the core decided, in place."""

import gc
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from policy_core import _scaling
from policy_core._backend import Site, Step, Wrapping
from policy_core._plan import STATE_SUFFIXES, Plan, TensorSpec

from . import _native, _plain
from ._adapters import adapter_for
from ._casting import CASTABLE, from_numpy, to_numpy
from ._classes import (
    CODES,
    SCALE,
    KeepsCodes,
    Stored,
    Wrapped,
    base_class,
    float_weight,
    wrapped_class,
)
from ._delayed import delayed_scale
from ._kernels import kernel_here
from ._layers import mixin_for, state_of
from ._ops import OPS, TF_DTYPES, Tensor
from ._quantize import quantize
from ._variables import (
    Casts,
    beside,
    check_place,
    forget_traces,
    memory_of,
    set_dtype,
    set_value,
    state_variable,
)
from ._walk import leaves, tensors_of


def storage_key(x: Any) -> object:
    """Gives what two tensors have in common exactly if they are one variable, read in one layout."""
    return (id(x.variable), x.transposed) if isinstance(x, Stored) else id(x)


def as_numpy(x: Any) -> Any:
    """Gives a tensor, variable or stored variable as a numpy array."""
    return to_numpy(x.read() if isinstance(x, Stored) else x)


def validate(step: Step) -> None:
    """Raises ValueError for a module that cannot be stored as decided; changes nothing."""
    if not tf.executing_eagerly():
        raise ValueError("Expected to wrap outside of any tf.function, eagerly.")
    if step.stored is not None or step.wrapping is None:
        return
    layer = step.site.layer
    plan = step.wrapping.plan
    plain = {spec.name: spec for spec in step.site.spec.tensors}
    ours = [spec.name for spec in plan.storage if spec.name not in plain]
    ours += [CODES] if plan.quantized and not plan.trainable else []
    own = vars(layer)
    for name in ours if not isinstance(layer, Wrapped) else ():
        if name in own or hasattr(type(layer), name):
            raise ValueError(
                f"{type(layer).__name__} has an attribute {name!r}, which the policy needs."
            )
    for name, spec in plain.items():
        kept = next((t for t in plan.storage if t.name == name), None)
        becomes_codes = plan.quantized and name == "weight"
        same = kept is None or kept.dtype in (spec.dtype, plan.weight_codes)
        if same and not becomes_codes:
            continue
        tensor = _float(step, name)
        if becomes_codes and not _all_finite(tensor):
            raise ValueError(
                "The weight holds a NaN or an infinity, which has no code. Repair it first."
            )
        if not same and kept is not None and tensor.dtype in CASTABLE:
            _check_fits(name, tensor, kept.dtype)
            check_place(layer, name)


def _all_finite(tensor: Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _check_fits(name: str, tensor: Tensor, dtype: str) -> None:
    tensor = tf.reshape(tensor, (-1,))
    finite = tf.boolean_mask(tensor, tf.math.is_finite(tensor))
    largest = tf.reduce_max(tf.abs(finite)) if tf.size(finite) else tf.zeros((), tensor.dtype)
    if not tf.math.is_finite(tf.cast(largest, TF_DTYPES[dtype])):
        raise ValueError(f"{name!r} holds {float(largest)}, which {dtype} cannot hold.")


def apply(model: tf.Module, steps: Sequence[Step]) -> tf.Module:
    """Changes the modules in place, one after the other.

    Raises:
        ValueError: Before anything changes, for what concerns the model as a whole.
    """
    _check_layouts(steps)
    forget_traces(model)
    # Tied weights are converted once, under the key that they had before anything changed.
    shared: dict[object, dict[str, Any]] = {}
    keys = {id(step): _weight_key(step.site) for step in steps}
    waiting = Counter(keys.values())
    # An embedding alone reads single rows, which plain codes give faster.
    multiplied = {keys[id(step)] for step in steps if step.site.spec.kind == "linear"}
    casts: Casts = {}
    replaced = {}
    for step in steps:
        key = keys[id(step)]
        # Training functions may well hold what freeze leaves behind.
        if _keeps_codes_after(step) and not isinstance(step.site.layer, Wrapped):
            replaced[step.site.path] = memory_of(step.site.tensors["weight"].variable)
        # The site must not keep the float weight alive.
        step.site.tensors = {}
        if step.wrapping is None:
            for name, array in (step.floats or {}).items():
                set_value(step.site.layer, name, from_numpy(array))
        else:
            _become(step, step.wrapping, shared.setdefault(key, {}), key in multiplied, casts)
        step.floats = step.stored = None
        waiting[key] -= 1
        if not waiting[key]:
            shared.pop(key, None)
    if any(memory() is not None for memory in replaced.values()):
        gc.collect()  # the traces that were forgotten are cycles
    held = [path for path, memory in replaced.items() if memory() is not None]
    if held:
        warnings.warn(
            f"Someone else holds the float weights of {', '.join(map(repr, held))}, so that they are "
            "not freed: an optimizer, or a tf.function that was traced before and goes on with "
            "them. Wrap a model before both.",
            stacklevel=4,
        )
    return model


def _keeps_codes_after(step: Step) -> bool:
    plan = None if step.wrapping is None else step.wrapping.plan
    return plan is not None and plan.quantized and not plan.trainable


def _check_layouts(steps: Sequence[Step]) -> None:
    """Refuses to make codes of a variable that modules hold in two layouts: it would come apart."""
    owners: dict[int, tuple[str, bool]] = {}
    for step in filter(_keeps_codes_after, steps):
        weight = step.site.tensors["weight"]
        path, transposed = owners.setdefault(
            id(weight.variable), (step.site.path, weight.transposed)
        )
        if transposed != weight.transposed:
            raise ValueError(
                f"{path!r} and {step.site.path!r} share one variable, of shape (in, out) for one and "
                "(out, in) for the other; its codes cannot serve both. Untie them first."
            )


def unwrap(model: tf.Module, sites: Sequence[Site]) -> tf.Module:
    """Makes modules plain again, in the dtypes that they had."""
    forget_traces(model)
    shared: dict[object, tf.Variable] = {}
    casts: Casts = {}
    keys = {id(site): _weight_key(site) for site in sites}
    for site in sites:
        layer: Any = site.layer
        site.tensors = {}
        if isinstance(layer, KeepsCodes):
            spec = next(s for s in layer._policy_plain if s.name == "weight")
            _put_weight(layer, float_weight(layer, spec.dtype), shared, keys[id(site)])
        for name in _policy_variables(layer):
            delattr(layer, name)
        for spec in layer._policy_plain:
            set_dtype(layer, spec.name, TF_DTYPES[spec.dtype], casts)
        layer.__class__ = layer._policy_base
        for name in [name for name in vars(layer) if name.startswith("_policy_")]:
            del vars(layer)[name]
    return model


def _weight_key(site: Site) -> object:
    weight = site.tensors.get("weight")
    return id(site) if weight is None else storage_key(weight)


def _float(step: Step, name: str) -> Tensor:
    """Gives a tensor of a module as a float, from the step's own first."""
    if step.floats is not None:
        return from_numpy(step.floats[name])
    layer = step.site.layer
    if name == "weight" and isinstance(layer, KeepsCodes):
        dtype = next(s.dtype for s in step.site.spec.tensors if s.name == name)
        return float_weight(layer, dtype)
    return tensors_of(layer, adapter_for(base_class(layer)))[name].read()


def _become(
    step: Step,
    wrapping: Wrapping,
    tied: dict[str, Any],
    multiplied: bool,
    casts: Casts,
) -> None:
    """Gives a module its wrapped class, and the variables of its plan."""
    layer: Any = step.site.layer
    plan = wrapping.plan
    plain = {spec.name for spec in step.site.spec.tensors}
    codes_only = plan.quantized and not plan.trainable
    stored = None
    if step.stored is not None:
        stored = {name: from_numpy(array) for name, array in step.stored.items()}
    made = {}
    if codes_only and CODES not in tied:
        codes, scale = _codes(step, plan, stored)
        with beside(layer):
            tied[CODES] = state_variable(_laid_out(codes, plan, layer, multiplied), CODES)
            tied[SCALE] = state_variable(
                tf.broadcast_to(tf.reshape(scale, (-1,)), codes.shape[:1]), SCALE
            )
        del codes
    for spec in plan.storage:
        if spec.name in plain or (codes_only and spec.name == SCALE):
            continue
        if spec.name.endswith(STATE_SUFFIXES):
            value = stored[spec.name] if stored else _state_value(layer, spec)
            made[spec.name] = value
    floats = {}
    for spec in plan.storage:
        if spec.name in plain and not (codes_only and spec.name == "weight"):
            floats[spec.name] = stored[spec.name] if stored else None
            if stored is None and (step.floats is not None or _is_codes(layer, spec.name)):
                floats[spec.name] = _float(step, spec.name)
    with beside(layer):
        new = {name: state_variable(value, name) for name, value in made.items()}
    # What can be refused was done above.
    for name in _policy_variables(layer) if isinstance(layer, Wrapped) else ():
        delattr(layer, name)
    if not isinstance(layer, Wrapped):
        vars(layer)["_policy_plain"] = step.site.spec.tensors
    base = base_class(layer)
    adapter = adapter_for(base)
    if codes_only and adapter.weight in vars(layer):
        vars(layer)["_policy_trained"] = bool(vars(layer)[adapter.weight].trainable)
        delattr(layer, adapter.weight)
    elif not codes_only and isinstance(layer, KeepsCodes):
        _put_weight(layer, floats.pop("weight"), tied, "parameter")
    layer.__class__ = wrapped_class(mixin_for(plan, adapter), base)
    vars(layer)["_policy_wrapping"] = wrapping
    if codes_only:
        setattr(layer, CODES, tied[CODES])
        setattr(layer, SCALE, tied[SCALE])
    for name, variable in new.items():
        setattr(layer, name, variable)
    dtypes = {spec.name: TF_DTYPES[spec.dtype] for spec in plan.storage}
    for name in plain & dtypes.keys():
        if codes_only and name == "weight":
            continue
        set_dtype(layer, name, dtypes[name], casts)
        if floats.get(name) is not None:
            set_value(layer, name, floats[name])


def _is_codes(layer: Any, name: str) -> bool:
    return name == "weight" and isinstance(layer, KeepsCodes)


def _codes(step: Step, plan: Plan, stored: dict[str, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Gives a weight's codes, their bits, and its scale."""
    assert plan.weight_codes is not None
    if stored is not None:
        return _plain.as_bits(stored["weight"]), stored["weight_scale"]
    layer: Any = step.site.layer
    weight = _float(step, "weight")
    before = layer._policy_wrapping.plan if isinstance(layer, Wrapped) else None
    if before is not None and before.asked == plan.asked and step.floats is None and plan.delayed:
        # Freezing: the codes with which the layer computes outside training.
        scale = delayed_scale(state_of(layer, "weight"), weight, plan.weight_codes, False)
        return _plain.as_bits(_plain.encode(weight, scale, plan.weight_codes)), scale
    codes, scale = quantize(weight, plan.weight_codes, plan.scale_axes)
    return _plain.as_bits(codes), scale


def _laid_out(bits: Tensor, plan: Plan, layer: Any, multiplied: bool) -> Tensor:
    """Gives codes as a layer keeps them: packed, where the native kernels multiply by them."""
    device = next((v.device for _, v in leaves(layer) if isinstance(v, tf.Variable)), "")
    if not multiplied or kernel_here(device) != "native":
        return bits
    return _native.pack(bits, str(plan.weight_codes))


def _state_value(layer: Any, spec: TensorSpec) -> Tensor:
    """Gives the value of state that the module has already, else that before any training call."""
    own = vars(layer).get(spec.name) if isinstance(layer, Wrapped) else None
    if own is not None and tuple(own.shape) == spec.shape:
        return tf.convert_to_tensor(own)
    fresh = _scaling.initial_state(OPS, spec.shape[0] if spec.shape else 1)
    return fresh.amax_history if spec.shape else tf.constant(fresh.scale.value)


def _policy_variables(layer: Any) -> list[str]:
    """Gives the attributes of a wrapped module that hold codes, scales or amax histories."""
    plain = {spec.name for spec in layer._policy_plain}
    names = {spec.name for spec in layer._policy_wrapping.plan.storage} - plain
    return [name for name in (*names, CODES) if name in vars(layer)]


def _put_weight(layer: Any, weight: Tensor, shared: dict[Any, tf.Variable], key: object) -> None:
    """Gives a module its float weight back; modules that share it get one variable."""
    adapter = layer._policy_adapter
    if key not in shared:
        value = tf.transpose(weight) if adapter.transposed else weight
        with beside(layer):
            shared[key] = tf.Variable(value, trainable=layer._policy_trained, name=adapter.weight)
    for name in (CODES, SCALE):
        if name in vars(layer):
            delattr(layer, name)
    setattr(layer, adapter.weight, shared[key])
