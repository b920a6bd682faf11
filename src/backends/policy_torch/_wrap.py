"""Changes the layers of a module tree as the core decided, in place."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from policy_core import _scaling
from policy_core._backend import Site, Step, Wrapping
from policy_core._plan import STATE_SUFFIXES, Plan, TensorSpec

from . import _attention, _fast_path
from ._adapters import adapter_for
from ._casting import CASTABLE, from_numpy
from ._classes import (
    CODES,
    PACKED,
    SCALE,
    KeepsCodes,
    Wrapped,
    base_class,
    policy_buffers,
    wrapped_class,
)
from ._float8 import inference_scale_of
from ._layers import mixin_for
from ._ops import TORCH_DTYPES, TorchOps
from ._packed import PackedCodes, drop_packed, pack_layer
from ._places import (
    cast_in_place,
    device_of,
    drop_buffer,
    put_buffer,
    put_weight,
    set_in_place,
    tensor_of,
)
from ._quantize import dequantize, encode, quantize
from ._walk import reason_to_refuse


def validate(step: Step) -> None:
    """Raises ValueError for a layer that cannot be stored as decided; changes nothing."""
    layer: nn.Module = step.site.layer
    reason = reason_to_refuse(layer)
    if reason and step.wrapping is not None:
        raise ValueError(reason)
    if step.stored is not None or step.wrapping is None:
        return
    plan = step.wrapping.plan
    own = step.site.tensors
    names = {spec.name for spec in step.site.spec.tensors}
    taken = [s.name for s in plan.storage if s.name not in names and s.name not in own]
    for name in [n for n in taken if hasattr(layer, n)]:
        raise ValueError(
            f"{type(layer).__name__} has an attribute {name!r}, which the policy needs."
        )
    for spec in step.site.spec.tensors:
        kept = next((t for t in plan.storage if t.name == spec.name), None)
        becomes_codes = plan.quantized and spec.name == "weight"
        same = kept is None or kept.dtype == spec.dtype or kept.dtype == plan.weight_codes
        if same and not becomes_codes:
            continue
        tensor = _float(step, spec.name)
        if becomes_codes and not _all_finite(tensor):
            raise ValueError(
                "The weight holds a NaN or an infinity, which has no code. Repair it first."
            )
        if not same and kept is not None and tensor.dtype in CASTABLE:
            _check_fits(spec.name, tensor, kept.dtype)


def _all_finite(tensor: torch.Tensor) -> bool:
    # A maximum is one pass without a temporary of the weight's size; it is NaN if any value is.
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _check_fits(name: str, tensor: torch.Tensor, dtype: str) -> None:
    if tensor.numel() == 0:
        return
    finite = tensor.detach()
    if not _all_finite(finite):
        finite = finite[torch.isfinite(finite)]
    low, high = torch.aminmax(finite) if finite.numel() else (finite.new_zeros(()),) * 2
    largest = torch.maximum(high, -low)
    if not torch.isfinite(largest.to(TORCH_DTYPES[dtype])):
        raise ValueError(f"{name!r} holds {float(largest)}, which {dtype} cannot hold.")


def apply(model: nn.Module, steps: Sequence[Step]) -> nn.Module:
    """Changes the layers in place, one after the other."""
    # Tied weights are converted once, under the key that they had before anything changed.
    shared: dict[object, dict[str, torch.Tensor]] = {}
    keys = {id(step): _weight_key(step.site) for step in steps}
    waiting = Counter(keys.values())
    # An embedding alone reads single rows, which plain codes give faster.
    multiplied = {keys[id(step)] for step in steps if step.site.spec.kind == "linear"}
    for step in steps:
        layer = _attention.attached(step.site.layer) if step.wrapping else step.site.layer
        # The site must not keep the float weight alive.
        step.site.tensors = {}
        if step.wrapping is None:
            _overwrite(layer, step)
        elif step.stored is not None:
            tensors = {n: from_numpy(a) for n, a in step.stored.items()}
            tied = shared.setdefault(keys[id(step)], {})
            _become(layer, step.wrapping, step.site.spec.tensors, tensors, tied)
        else:
            tied = shared.setdefault(keys[id(step)], {})
            tensors = _made(layer, step, step.wrapping.plan, tied)
            _become(layer, step.wrapping, step.site.spec.tensors, tensors, tied)
        if isinstance(layer, KeepsCodes) and keys[id(step)] in multiplied:
            pack_layer(layer, shared[keys[id(step)]])
        step.site.layer = layer
        step.floats = step.stored = None
        waiting[keys[id(step)]] -= 1
        if not waiting[keys[id(step)]]:
            # The plain codes of packed ones must not pile up until the last layer is done.
            shared.pop(keys[id(step)], None)
    _fast_path.update(model)
    return model


def unwrap(model: nn.Module, sites: Sequence[Site]) -> nn.Module:
    """Makes layers plain again, in the dtypes that they had."""
    shared: dict[object, nn.Parameter] = {}
    keys = {id(site): _weight_key(site) for site in sites}
    for site in sites:
        layer: Any = site.layer
        site.tensors = {}
        if isinstance(layer, KeepsCodes):
            key = keys[id(site)]
            if key not in shared:
                spec = next(s for s in layer._policy_plain if s.name == "weight")
                weight = dequantize(layer.weight_codes, layer.weight_scale, spec.dtype)
                weight = weight.t() if layer._policy_adapter.transposed else weight
                shared[key] = nn.Parameter(weight.contiguous(), layer._policy_trained)
            put_weight(layer, shared[key])
        for name in policy_buffers(layer):
            drop_buffer(layer, name)
        for spec in layer._policy_plain:
            cast_in_place(layer, spec.name, TORCH_DTYPES[spec.dtype])
        layer.__class__ = layer._policy_base
        for name in [name for name in layer.__dict__ if name.startswith("_policy_")]:
            del layer.__dict__[name]
    _attention.detach_unwrapped(model)
    _fast_path.update(model)
    return model


def storage_key(x: torch.Tensor | PackedCodes) -> object:
    """Gives what two tensors have in common exactly if they are the same elements in memory."""
    if isinstance(x, PackedCodes):
        return storage_key(x.packed)
    # A subclass, such as a shard, may have no memory of its own; nor has a tensor without elements.
    if x.numel() == 0 or x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return id(x)
    place = (x.untyped_storage().data_ptr(), x.storage_offset())
    return (x.device, *place, tuple(x.shape), x.stride(), x.dtype)


def _weight_key(site: Site) -> object:
    weight = site.tensors.get("weight")
    return id(site) if weight is None else storage_key(weight)


def _float(step: Step, name: str) -> torch.Tensor:
    """Gives a tensor of a layer as a float, from the step's own first."""
    if step.floats is not None:
        return from_numpy(step.floats[name])
    layer: Any = step.site.layer
    if name == "weight" and isinstance(layer, KeepsCodes):
        dtype = next(s.dtype for s in step.site.spec.tensors if s.name == name)
        return dequantize(layer.weight_codes, layer.weight_scale, dtype)
    return tensor_of(layer, name)


def _made(
    layer: nn.Module, step: Step, plan: Plan, tied: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gives the tensors of `plan.storage`, made from the layer's own or from `step.floats`."""
    tensors: dict[str, torch.Tensor] = {}
    step.site.layer = layer
    codes_only = plan.quantized and not plan.trainable
    device = device_of(layer)
    plain = step.site.spec.tensors
    for spec in plan.storage:
        if codes_only and spec.name in ("weight", "weight_scale"):
            if CODES not in tied:
                tied[CODES], tied[SCALE] = _codes(layer, step, plan)
            tensors[spec.name] = tied[CODES if spec.name == "weight" else SCALE].to(device)
        elif spec.name.endswith(STATE_SUFFIXES) and not _is_plain(spec.name, plain):
            tensors[spec.name] = _state_tensor(layer, spec, device)
        else:
            tensors[spec.name] = _float(step, spec.name).detach()
    return tensors


def _codes(layer: Any, step: Step, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    assert plan.weight_codes is not None
    before = layer._policy_wrapping.plan if isinstance(layer, Wrapped) else None
    weight = _float(step, "weight").detach()
    if before is not None and before.asked == plan.asked and step.floats is None and plan.delayed:
        # Freezing: the codes with which the layer computes outside training.
        scale = inference_scale_of(layer, "weight", weight, plan.weight_codes)
        return encode(weight, scale, plan.weight_codes), scale.reshape([1] * weight.ndim)
    return quantize(weight, plan.weight_codes, plan.scale_axes)


def _state_tensor(layer: nn.Module, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Gives a state tensor that the layer has already, else one before any training call."""
    own = layer._buffers.get(spec.name)
    if own is not None and tuple(own.shape) == spec.shape:
        return own
    fresh = _scaling.initial_state(TorchOps(device), spec.shape[0] if spec.shape else 1)
    state: torch.Tensor = fresh.amax_history if spec.shape else fresh.scale
    return state


def _become(
    layer: Any,
    wrapping: Wrapping,
    plain: tuple[TensorSpec, ...],
    tensors: dict[str, torch.Tensor],
    tied: dict[str, torch.Tensor],
) -> None:
    """Gives a layer its wrapped class, and the tensors of its plan."""
    plan = wrapping.plan
    base = base_class(layer)
    adapter = adapter_for(base)
    if not isinstance(layer, Wrapped):
        layer.__dict__["_policy_plain"] = plain
    mixin = mixin_for(plan, adapter, base)
    kind = wrapped_class(mixin, base)
    device = device_of(layer)
    codes_only = issubclass(mixin, KeepsCodes)
    names = {CODES if codes_only and n == "weight" else n for n in tensors}
    for name in policy_buffers(layer) if isinstance(layer, Wrapped) else ():
        if name not in {*names, PACKED}:
            drop_buffer(layer, name)
    if codes_only:
        # One tensor object for tied weights, so that they stay one.
        codes = tied.setdefault(CODES, tensors.pop("weight").to(device))
        scale = tied.setdefault(SCALE, tensors.pop("weight_scale").to(device))
        weight = layer._parameters.pop("weight", None)
        if weight is not None:
            layer.__dict__["_policy_trained"] = weight.requires_grad
        drop_packed(layer)
    elif isinstance(layer, KeepsCodes):
        put_weight(layer, _tied_parameter(layer, tensors["weight"], tied))
    layer.__class__ = kind
    layer.__dict__["_policy_wrapping"] = wrapping
    if codes_only:
        put_buffer(layer, CODES, codes)
        put_buffer(layer, SCALE, scale)
    dtypes = {spec.name: TORCH_DTYPES[spec.dtype] for spec in plan.storage}
    for name, tensor in tensors.items():
        if not _is_plain(name, plain):
            put_buffer(layer, name, tensor.to(device))
        else:
            set_in_place(layer, name, tensor, dtypes[name])


def _is_plain(name: str, plain: tuple[TensorSpec, ...]) -> bool:
    return any(spec.name == name for spec in plain)


def _tied_parameter(
    layer: Any, weight: torch.Tensor, tied: dict[str, torch.Tensor]
) -> nn.Parameter:
    if "parameter" not in tied:
        portable = weight.t().contiguous() if layer._policy_adapter.transposed else weight
        copied = portable.to(device_of(layer)).clone()
        tied["parameter"] = nn.Parameter(copied, layer._policy_trained)
    parameter = tied["parameter"]
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _overwrite(layer: nn.Module, step: Step) -> None:
    """Gives a plain layer other floats."""
    for spec in step.site.spec.tensors:
        if step.floats is not None and spec.name in step.floats:
            tensor = from_numpy(step.floats[spec.name])
            set_in_place(layer, spec.name, tensor, TORCH_DTYPES[spec.dtype])
