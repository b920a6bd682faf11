"""Where a torch layer keeps a tensor, and how another takes its place."""

from typing import Any

import torch
from torch import nn

from ._adapters import adapter_for
from ._classes import CODES, SCALE, base_class
from ._packed import drop_packed


def tensor_of(layer: nn.Module, name: str) -> torch.Tensor:
    """Gives a layer's tensor by its portable name."""
    *inner, last = name.split(".")
    owner = layer.get_submodule(".".join(inner))
    tensor: torch.Tensor = getattr(owner, last)
    transposed = name == "weight" and adapter_for(base_class(layer)).transposed
    return tensor.t() if transposed else tensor


def put_weight(layer: Any, weight: nn.Parameter) -> None:
    """Gives a layer its float weight back, in the place that it had among the parameters."""
    drop_packed(layer)
    drop_buffer(layer, CODES)
    drop_buffer(layer, SCALE)
    others = {n: p for n, p in layer._parameters.items() if n != "weight"}
    layer._parameters.clear()
    layer._parameters.update({"weight": weight, **others})


def put_buffer(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Gives a layer a buffer, last of all unless it is the one that it has."""
    if layer._buffers.get(name) is not tensor:
        layer._buffers.pop(name, None)
        layer.register_buffer(name, tensor)


def drop_buffer(layer: Any, name: str) -> None:
    """Removes a buffer, if the layer has it."""
    layer._buffers.pop(name, None)
    layer._non_persistent_buffers_set.discard(name)


@torch.no_grad()
def set_in_place(layer: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Gives a parameter or buffer values and a dtype; the tensor object, and what is tied, stay."""
    own = tensor_of(layer, name)
    if not (own.data_ptr() == tensor.data_ptr() and own.dtype == tensor.dtype):
        if own.dtype == dtype:
            own.copy_(tensor)
        else:
            cast_in_place(layer, name, dtype)
            tensor_of(layer, name).copy_(tensor)
    else:
        cast_in_place(layer, name, dtype)


@torch.no_grad()
def cast_in_place(layer: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Gives a parameter or buffer another dtype, and its gradient too."""
    *inner, last = name.split(".")
    owner = layer.get_submodule(".".join(inner))
    tensor: torch.Tensor | None = owner._parameters.get(last)
    if tensor is None:
        tensor = owner._buffers[last]
    assert tensor is not None
    if tensor.dtype == dtype:
        return
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.to(dtype)


def device_of(layer: nn.Module) -> torch.device:
    """Gives where a layer's first tensor is."""
    for tensors in (layer._parameters, layer._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                return tensor.device
    return torch.device("cpu")
