"""Layers on a CPU whose codes lie in the layout of the native kernels, and nowhere else.

The packed bytes are a buffer that is not saved. What is seen from outside, in `weight_codes`, in
state_dict and in files, are the plain codes, made from it.
"""

import copy
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._autograd import packed_linear
from ._classes import CODES, PACKED, SCALE, KeepsCodes, compute_dtype, wrapped_class
from ._float8 import inference_scale_of
from ._kernels import packed_rows, unpack
from ._layers import CodesEmbedding, CodesLinear, as_numbers, check_columns
from ._native import outruns_torch, pack
from ._ops import TORCH_DTYPES


@dataclass(frozen=True)
class PackedCodes:
    """A packed weight as one of a layer's tensors.

    Attributes:
        packed: The packed bytes.
        shape: The shape of the codes.
        dtype: Their dtype.
    """

    packed: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What the packed codes take, padding included."""
        return self.packed.nbytes

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.packed.device

    def unpack(self) -> torch.Tensor:
        """Gives the codes."""
        n = self.shape[0]
        return unpack(self.packed, n, math.prod(self.shape[1:]), self.dtype).reshape(self.shape)


class Packed(KeepsCodes):
    """What layers with packed codes share."""

    weight_packed: torch.Tensor
    _policy_shape: tuple[int, ...]

    @property
    def packed_codes(self) -> PackedCodes:
        """The layer's codes as they are kept."""
        dtype = TORCH_DTYPES[str(self._policy_wrapping.plan.weight_codes)]
        return PackedCodes(self.weight_packed, self._policy_shape, dtype)

    @property
    def weight_codes(self) -> torch.Tensor:  # type: ignore[override]
        """The codes of the weight, made anew."""
        return self.packed_codes.unpack()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[prefix + CODES] = self.weight_codes

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._accept_float_checkpoint(state_dict, prefix, error_msgs)
        key = prefix + CODES
        codes = state_dict.pop(key, None)
        own = self.packed_codes
        if codes is None:
            missing_keys.append(key)
        elif tuple(codes.shape) != own.shape or codes.dtype != own.dtype:
            error_msgs.append(
                f"size mismatch for {key}: expected {own.dtype} of shape {own.shape}, the checkpoint "
                f"has {codes.dtype} of shape {tuple(codes.shape)}."
            )
        else:
            self.weight_packed.copy_(pack(codes.cpu().flatten(1)))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        packed = self._buffers[PACKED]  # type: ignore[attr-defined]
        # Asked of a few bytes: `fn` may move memory, or give it up.
        moved = fn(packed[:1])
        if moved.device.type == "cpu":
            return super()._apply(fn, recurse)
        unpack_layer(self)
        return self._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, arguments, state, *rest = super().__reduce_ex__(protocol)
        state["_buffers"][PACKED] = _boxed(self.packed_codes)
        return rebuild, arguments, state, *rest


class PackedLinear(Packed, CodesLinear):
    """A linear layer on a CPU that keeps only packed codes."""

    def _device_type(self) -> str:
        return "cpu"

    def _linear(self, input: torch.Tensor) -> torch.Tensor:
        plan = self._policy_wrapping.plan
        n, *sizes = self._policy_shape
        k = sizes[0] if len(sizes) == 1 else math.prod(sizes)
        x = as_numbers(input, TORCH_DTYPES[plan.compute_dtype])
        check_columns(x, k)
        x_scale = None
        if plan.delayed and plan.input_codes is not None:
            x_scale = inference_scale_of(self, "input", x, plan.input_codes)  # type: ignore[arg-type]
        # Past nn.Module's slow way to attributes: a call of one row takes some microseconds in all.
        packed, scale = self._buffers[PACKED], self._buffers[SCALE]  # type: ignore[attr-defined]
        return packed_linear(x, x_scale, packed, (n, k), scale, self.bias, plan)


class PackedEmbedding(Packed, CodesEmbedding):
    """An embedding on a CPU that shares packed codes with a linear layer."""

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        codes, (n, k) = self.packed_codes, self._policy_shape
        return packed_rows(
            ids, codes.packed, n, k, codes.dtype, self.weight_scale, compute_dtype(self)
        )


_PAIRS: dict[type[KeepsCodes], type[KeepsCodes]] = {
    CodesLinear: PackedLinear,
    CodesEmbedding: PackedEmbedding,
}


class _PackedBox:
    """Packed codes on their way through pickle: as plain codes, which suit any address."""

    def __init__(self, codes: PackedCodes) -> None:
        self.codes = codes

    def __reduce__(self) -> Any:
        bits = self.codes.unpack().flatten(1).view(torch.uint8)
        return _repacked, (bits, self.codes.dtype)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        # torch's memory is aligned, so the bytes mean the same in the copy.
        copied: torch.Tensor = copy.deepcopy(self.codes.packed, memo)
        return copied


_BOXES: "weakref.WeakValueDictionary[int, _PackedBox]" = weakref.WeakValueDictionary()


def _boxed(codes: PackedCodes) -> _PackedBox:
    """Gives the box of packed codes, the same for those that layers share."""
    box = _BOXES.get(id(codes.packed))
    if box is None or box.codes.packed is not codes.packed:
        box = _BOXES[id(codes.packed)] = _PackedBox(codes)
    return box


def _repacked(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return pack(bits.view(dtype))


def pack_layer(layer: Any, shared: dict[str, Any]) -> None:
    """Gives a layer on a CPU its codes packed, where the native kernels would read them so.

    Args:
        layer: A layer that keeps only codes.
        shared: What was made for the layers with which it shares them: under `"packed"`.
    """
    if layer._policy_mixin not in _PAIRS:
        return
    operand = "s8" if layer._policy_wrapping.plan.weight_codes == "int8" else "f8"
    codes = layer._buffers[CODES]
    if codes.device.type != "cpu" or not outruns_torch(f"linear_{operand}"):
        return
    if shared.get("packed") is None:
        shared["packed"] = pack(codes.flatten(1))
    layer.__dict__["_policy_shape"] = tuple(codes.shape)
    del layer._buffers[CODES]
    layer.register_buffer(PACKED, shared["packed"], persistent=False)
    layer.__class__ = wrapped_class(_PAIRS[layer._policy_mixin], layer._policy_base)


def unpack_layer(layer: Any) -> None:
    """Gives a layer with packed codes plain ones again."""
    codes = layer.weight_codes
    drop_packed(layer)
    plain = next(one for one, other in _PAIRS.items() if other is layer._policy_mixin)
    layer.__class__ = wrapped_class(plain, layer._policy_base)
    layer.register_buffer(CODES, codes)


def drop_packed(layer: nn.Module) -> None:
    """Removes what only a layer with packed codes has."""
    layer._buffers.pop(PACKED, None)
    layer._non_persistent_buffers_set.discard(PACKED)
    layer.__dict__.pop("_policy_shape", None)
