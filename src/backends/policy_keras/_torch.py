"""Products where Keras runs on PyTorch; `_kernels.Products` says what each function gives."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from policy_core._forms import Axes
from policy_core._plan import Plan
from policy_torch import _native
from policy_torch._autograd import codes_linear, float8_linear, packed_linear
from policy_torch._float8 import GradientScale, delayed_scale, is_training_call
from policy_torch._kernels import kernel_table as torch_kernel_table
from policy_torch._kernels import packed_rows
from policy_torch._kernels import unpack as unpack_codes
from policy_torch._layers import as_rows, autocast_off
from policy_torch._ops import TORCH_DTYPES
from policy_torch._quantize import encode, quantize

from ._kernels import CODES, PACKED

Tensors = dict[str, torch.Tensor]


def kernel_table(tensor: Any, axes: Axes | None) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    device = "cpu" if tensor is None else tensor.device.type
    return device, torch_kernel_table(device)


def place_of(variable: Any) -> None:
    return None


def made_at(place: None) -> AbstractContextManager[None]:
    return nullcontext()


def layout(place: None, shape: tuple[int, ...] | None = None, axes: Axes | None = None) -> None:
    return None


def _packs(plan: Plan) -> bool:
    # What the plan found when it looked at the device.
    return plan.quantized and not plan.kernel.endswith(("_torch", "_int_mm", "_scaled_mm"))


def store(codes: torch.Tensor, plan: Plan, multiplies: bool) -> tuple[str, torch.Tensor]:
    if multiplies and _packs(plan) and codes.device.type == "cpu":
        return PACKED, _native.pack(codes)
    return CODES, codes


def restore(stored: torch.Tensor, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    if stored.dtype == torch.uint8:
        return unpack_codes(stored, *shape, TORCH_DTYPES[dtype])
    return stored


def linear(
    plan: Plan,
    shape: tuple[int, int],
    x: torch.Tensor,
    tensors: Tensors,
    training: bool,
    group: Any,
) -> tuple[torch.Tensor, Tensors]:
    n, k = shape
    rows = as_rows(x, k)
    bias = tensors.get("bias")
    with autocast_off(x.device):
        if plan.trainable:
            y = _trainable(plan, rows, tensors, bias, training, group)
        else:
            x_scale = None
            if plan.delayed and plan.input_codes is not None:
                x_scale = delayed_scale(_state(tensors, "input"), rows, plan.input_codes, False)
            scale = tensors["weight_scale"].reshape(() if plan.delayed else (-1,))
            weight = tensors["weight"]
            if weight.dtype == torch.uint8:
                y = packed_linear(rows, x_scale, weight, shape, scale, bias, plan)
            else:
                y = codes_linear(rows, x_scale, weight, scale, bias, plan)
    return (y if x.ndim == 2 else y.reshape(*x.shape[:-1], n)), {}


def _trainable(
    plan: Plan,
    rows: torch.Tensor,
    tensors: Tensors,
    bias: torch.Tensor | None,
    training: bool,
    group: Any,
) -> torch.Tensor:
    assert plan.weight_codes is not None
    assert plan.input_codes is not None
    weight = tensors["weight"]
    # On torch's meta device Keras looks for shapes alone.
    asked: Any = SimpleNamespace(training=training and rows.device.type != "meta")
    moving = is_training_call(asked, rows.shape[0])
    x_scale = weight_scale = state = None
    if plan.delayed:
        pairs = (("input", rows, plan.input_codes), ("weight", weight, plan.weight_codes))
        x_scale, weight_scale = (
            delayed_scale(_state(tensors, role), value, codes, moving, group)
            for role, value, codes in pairs
        )
        state = _state(tensors, "output_grad")
    return float8_linear(
        rows, weight, bias, x_scale, weight_scale, GradientScale(state, moving, group), plan
    )


def _state(tensors: Tensors, role: str) -> tuple[torch.Tensor, torch.Tensor]:
    # The variables' own memory: it is written to in place, in the backward pass too.
    return tensors[f"{role}_scale"], tensors[f"{role}_amax_history"]


def rows(
    plan: Plan,
    shape: tuple[int, int],
    ids: torch.Tensor,
    stored: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    kind = TORCH_DTYPES[str(plan.weight_codes)]
    dtype = TORCH_DTYPES[plan.compute_dtype]
    if stored.dtype == torch.uint8:
        return packed_rows(ids, stored, *shape, kind, scale, dtype)
    ids = ids.long()
    # By their bits: float8 has no look-up of its own.
    codes = torch.nn.functional.embedding(ids, stored.view(torch.uint8)).view(kind)
    return (codes.float() * torch.nn.functional.embedding(ids, scale)).to(dtype)


def frozen_weight(plan: Plan, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    assert plan.weight_codes is not None
    weight = tensors["weight"].detach()
    if not plan.delayed:
        return quantize(weight, plan.weight_codes, plan.scale_axes)
    scale = delayed_scale(_state(tensors, "weight"), weight, plan.weight_codes, False)
    return encode(weight, scale, plan.weight_codes), scale.reshape(1, 1)


def gradient_state(layer: Any, name: str, value: Any, layout: None) -> None:
    return None
