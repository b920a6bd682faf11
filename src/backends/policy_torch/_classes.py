"""Wrapped classes: a mixin in front of the layer's own class, so that the layer stays one of it."""

import copy
import weakref
from typing import Any

import torch
from torch import nn

from policy_core import DTypePolicy
from policy_core._backend import Wrapping
from policy_core._plan import STATE_SUFFIXES, Plan, TensorSpec

from ._adapters import LayerAdapter, adapter_for
from ._ops import TORCH_DTYPES
from ._quantize import dequantize, quantize

CODES, SCALE, PACKED = "weight_codes", "weight_scale", "weight_packed"


class Wrapped:
    """What all wrapped layers have: their policy, copies and pickles, and codes that stay codes.

    A layer is wrapped by giving it a class of the same name with a mixin in front of its own. The
    object stays, and with it references, hooks and `isinstance`.
    """

    _policy_base: type[nn.Module]
    _policy_mixin: "type[Wrapped]"
    _policy_adapter: LayerAdapter
    _policy_wrapping: Wrapping
    _policy_plain: tuple[TensorSpec, ...]
    _policy_group: Any = None
    _policy_trained: bool = True

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The layer's policy: what was asked, or its source where it has no quantized form."""
        return self._policy_wrapping.plan.policy

    @property
    def policy_plan(self) -> Plan:
        """Everything that was decided for the layer."""
        return self._policy_wrapping.plan

    def extra_repr(self) -> str:
        own: str = super().extra_repr()  # type: ignore[misc]  # the class behind the mixin has it
        return ", ".join(filter(None, [own, f"dtype_policy={self.dtype_policy!r}"]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made at run time have no address that pickle could write down.
        state: Any
        _, _, state, *rest = super().__reduce_ex__(2)
        buffers = {name: _boxed(buffer) for name, buffer in state["_buffers"].items()}
        # A process group and a lock belong to this process.
        state = {**state, "_buffers": buffers}
        state.pop("_policy_group", None)
        state.pop("_policy_lock", None)
        return _rebuild, (self._policy_mixin, self._policy_base), state, *rest

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: self._buffers[name] for name in policy_buffers(self)}  # type: ignore[attr-defined]
        for name in kept:
            self._buffers[name] = None  # type: ignore[attr-defined]
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for name, buffer in kept.items():
                # `.half()` must not round scales, or make numbers of codes; `.to(device)` moves
                # them. The tensor object stays, and with it what is tied.
                with torch.no_grad():
                    moved = fn(buffer)
                if moved.dtype != buffer.dtype:
                    moved = buffer.to(moved.device)
                if moved is not buffer:
                    buffer = _moved(buffer, moved)
                self._buffers[name] = buffer  # type: ignore[attr-defined]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        *_, error_msgs = args
        self._accept_float_checkpoint(state_dict, prefix, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def _accept_float_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]
    ) -> None:
        """Gives a float checkpoint of the plain layer the entries that it cannot have."""
        plan = self.policy_plan
        if not plan.quantized or f"{prefix}{CODES}" in state_dict:
            return
        weight = state_dict.get(f"{prefix}weight")
        own = [name for name in policy_buffers(self) if name != PACKED]
        if weight is None or any(f"{prefix}{name}" in state_dict for name in own):
            return
        if not plan.trainable:
            assert plan.weight_codes is not None
            del state_dict[f"{prefix}weight"]
            portable = weight.t() if self._policy_adapter.transposed else weight
            codes, scale = quantize(portable.detach(), plan.weight_codes, plan.scale_axes)
            if not torch.isfinite(scale).all():
                error_msgs.append(
                    f"{prefix}weight in the checkpoint holds a NaN or an infinity, which has no code."
                )
                codes, scale = self.weight_codes, self.weight_scale  # type: ignore[attr-defined]
            state_dict[f"{prefix}{CODES}"], state_dict[f"{prefix}{SCALE}"] = codes, scale
        for name in own:
            if name.endswith(STATE_SUFFIXES):
                state_dict.setdefault(f"{prefix}{name}", self._buffers[name])  # type: ignore[attr-defined]


class KeepsCodes(Wrapped):
    """A layer of whose weight only codes are left."""

    weight_codes: torch.Tensor
    weight_scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a float in the variable dtype, for parents that read it: made anew."""
        dtype = self.policy_plan.variable_dtype
        weight = dequantize(self.weight_codes, self.weight_scale, dtype)
        return weight.t() if self._policy_adapter.transposed else weight

    def reset_parameters(self) -> None:
        """Raises: there is no float weight to give new values."""
        raise RuntimeError(
            f"A layer under {self.dtype_policy.name!r} keeps only codes of its weight. Reset it before "
            "pc.wrap, or after pc.unwrap."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self._buffers[SCALE].device  # type: ignore[attr-defined]
        super()._apply(fn, recurse)
        if self._buffers[SCALE].device != before and CODES in self._buffers:  # type: ignore[attr-defined]
            from ._packed import pack_layer  # it knows the layers, which know this class

            pack_layer(self, {})
        return self


def policy_buffers(layer: Any) -> list[str]:
    """Gives the names of a wrapped layer's buffers that hold codes, scales or amax histories.

    Not those that the layer had before, whatever their names are.
    """
    plain = {spec.name for spec in layer._policy_plain}
    names = {spec.name for spec in layer._policy_wrapping.plan.storage} - plain
    if isinstance(layer, KeepsCodes):
        names |= {CODES, PACKED}
    return [name for name, buffer in layer._buffers.items() if name in names and buffer is not None]


_CLASSES: dict[tuple[type[Wrapped], type[nn.Module]], type[Any]] = {}


def wrapped_class(mixin: type[Wrapped], base: type[nn.Module]) -> type[Any]:
    """Gives the class of wrapped layers for a mixin and a layer's own class, made once."""
    found = _CLASSES.get((mixin, base))
    if found is None or found._policy_adapter != adapter_for(base):  # registered since
        found = _CLASSES[mixin, base] = _new_class(mixin, base)
    return found


def _new_class(mixin: type[Wrapped], base: type[nn.Module]) -> type[Any]:
    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_policy_base": base,
        "_policy_mixin": mixin,
        "_policy_adapter": adapter_for(base),
    }
    return type(base.__name__, (mixin, base), attributes)


def parts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Gives the children that a module reads and does not call, each with the prefix of its names."""
    if isinstance(module, nn.MultiheadAttention):
        called = getattr(module, "_policy_calls_projections", False)
        return [] if called else [("out_proj.", module.out_proj)]
    return [] if _is_container(module) else _parameter_lists(module, "")


_LISTS = (nn.ParameterList, nn.ParameterDict)


def _is_container(module: nn.Module) -> bool:
    """Says whether a module holds others for its parent, and is never called."""
    kinds = (*_LISTS, nn.ModuleList, nn.ModuleDict)
    return isinstance(module, kinds) and base_class(module).forward is nn.Module.forward


def _parameter_lists(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Gives the lists and dicts of parameters in a module, also those in containers in it."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():
        if isinstance(child, _LISTS):
            found.append((f"{prefix}{name}.", child))
        if child is not None and _is_container(child):
            found += _parameter_lists(child, f"{prefix}{name}.")
    return found


def base_class(module: nn.Module) -> type[nn.Module]:
    """Gives the layer's own class, without the mixin."""
    return module._policy_base if isinstance(module, Wrapped) else type(module)


def compute_dtype(module: Wrapped) -> torch.dtype:
    """Gives the torch dtype in which a wrapped layer computes."""
    return TORCH_DTYPES[module._policy_wrapping.plan.compute_dtype]


class _Float8Box:
    """A float8 tensor on its way through pickle, which torch 2.13 can write and not read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return _unboxed, (self.tensor.view(torch.uint8), self.tensor.dtype)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        copied: torch.Tensor = copy.deepcopy(self.tensor, memo)
        return copied


_BOXES: "weakref.WeakValueDictionary[int, _Float8Box]" = weakref.WeakValueDictionary()


def _boxed(buffer: torch.Tensor | None) -> Any:
    """Gives a float8 tensor in its box, a tied one in the same box; any other as it is."""
    if buffer is None or not buffer.dtype.is_floating_point or buffer.element_size() > 1:
        return buffer
    box = _BOXES.get(id(buffer))
    if box is None or box.tensor is not buffer:
        box = _BOXES[id(buffer)] = _Float8Box(buffer)
    return box


def _unboxed(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)


def _rebuild(mixin: type[Wrapped], base: type[nn.Module]) -> Any:
    kind: Any = wrapped_class(mixin, base)
    return kind.__new__(kind)


def _moved(buffer: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Gives a buffer the memory of another tensor, or the other tensor where torch forbids that."""
    if torch._has_compatible_shallow_copy_type(buffer, moved):
        buffer.data = moved
        return buffer
    return moved
