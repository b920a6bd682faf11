"""Which layers can be quantized, and how each kind reads its input: one entry a class.

An entry serves the class and every subclass that does not override `forward`. `register_layer` adds
one for a class of anyone's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from policy_core._dtypes import shorten
from policy_core._plan import LayerKind

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A layer's product: floats of shape (..., k) to (..., n), bias included."""


@dataclass(frozen=True, kw_only=True)
class LayerAdapter:
    """How layers of one class take a policy.

    Attributes:
        kind: `"linear"` for a layer whose parameter `weight` multiplies, and whose parameter `bias`,
            if any, is added to the product; `"embedding"` for rows of `weight`; `"norm"` for a layer
            that computes in float32 inside; `"other"` for one without a quantized form.
        forward: For `"linear"`: `forward(layer, linear, *args, **kwargs)` gives the layer's output,
            where `linear(x)` is the product under the layer's policy. None for `linear(x)` itself.
        transposed: Whether the parameter `weight` has shape (in, out).
        left_out: Says of one layer why it can't be quantized; `""` if it can.
    """

    kind: LayerKind
    forward: Callable[..., Any] | None = None
    transposed: bool = False
    left_out: Callable[[nn.Module], str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "embedding", "norm", "other"):
            raise ValueError(
                "Expected kind 'linear', 'embedding', 'norm' or 'other'. "
                f"Received: kind={self.kind!r}"
            )
        if self.kind != "linear" and (self.forward is not None or self.transposed):
            raise ValueError(
                f"'forward' and 'transposed' are for kind 'linear', not {self.kind!r}."
            )


def register_layer(cls: type[nn.Module], adapter: LayerAdapter) -> None:
    """Lets layers of a class take quantized policies, also if it overrides `forward`.

    Args:
        cls: A subclass of `torch.nn.Module`.
        adapter: How its layers compute.

    Raises:
        TypeError: `cls` is no such class, or `adapter` no `LayerAdapter`.
        ValueError: `cls` is registered already with another adapter.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"Expected a subclass of torch.nn.Module. Received: {shorten(cls)}")
    if not isinstance(adapter, LayerAdapter):
        raise TypeError(f"Expected a policy_torch.LayerAdapter. Received: {shorten(adapter)}")
    if _REGISTERED.setdefault(cls, adapter) != adapter:
        raise ValueError(f"{cls.__name__} is registered already with another adapter.")


def adapter_for(cls: type[nn.Module]) -> LayerAdapter:
    """Gives how layers of a class take a policy."""
    base: Any
    for base in cls.__mro__:
        if base in _REGISTERED:
            adapter = _REGISTERED[base]
            # A subclass that overrides forward does something that its base's entry cannot know.
            if cls is base or cls.forward is base.forward:
                return adapter
            if adapter.kind in ("linear", "embedding"):
                return LayerAdapter(kind=adapter.kind, left_out=_overrides_forward)
            return adapter
        if _is_hugging_face_conv1d(base) and cls.forward is base.forward:
            return LayerAdapter(kind="linear", transposed=True)
    if cls.__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")):
        return LayerAdapter(kind="norm")
    return LayerAdapter(kind="other")


def _overrides_forward(module: nn.Module) -> str:
    name = type(module).__name__
    return (
        f"{name} overrides forward; it follows the source policy. pc.register_layer can say how it "
        "computes"
    )


def _is_hugging_face_conv1d(cls: type) -> bool:
    # Known by its name alone, so that transformers need not be imported.
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")


def _conv(layer: Any, linear: Linear, input: torch.Tensor) -> torch.Tensor:
    """Gives a convolution as a product of patches, each a row with a scale of its own."""
    spatial = len(layer.kernel_size)
    batched = input.dim() == spatial + 2
    x = input if batched else input.unsqueeze(0)
    if not (x.is_complex() or (x.is_floating_point() and x.element_size() > 1)):
        x = x.float()  # torch has no patches of integers
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    sizes = list(zip(x.shape[2:], layer.kernel_size, layer.dilation, layer.stride, strict=True))
    out = [(size - dilation * (k - 1) - 1) // stride + 1 for size, k, dilation, stride in sizes]
    if spatial == 1:
        x = x.unsqueeze(2)
    one = (1,) if spatial == 1 else ()
    patches = F.unfold(
        x,
        (*one, *layer.kernel_size),
        dilation=(*one, *layer.dilation),
        stride=(*one, *layer.stride),
    )
    y = linear(patches.transpose(1, 2)).transpose(1, 2).unflatten(2, out)
    return y if batched else y.squeeze(0)


def _grouped(module: Any) -> str:
    if module.groups == 1:
        return ""
    return f"a convolution with {module.groups} groups is no single product"


_REGISTERED: dict[type[nn.Module], LayerAdapter] = {
    nn.Linear: LayerAdapter(kind="linear"),
    nn.Embedding: LayerAdapter(
        kind="embedding",
        left_out=lambda m: "" if m.max_norm is None else "max_norm changes the table at each call",
    ),
    nn.Conv1d: LayerAdapter(kind="linear", forward=_conv, left_out=_grouped),
    nn.Conv2d: LayerAdapter(kind="linear", forward=_conv, left_out=_grouped),
    nn.modules.batchnorm._NormBase: LayerAdapter(kind="norm"),
    nn.LayerNorm: LayerAdapter(kind="norm"),
    nn.GroupNorm: LayerAdapter(kind="norm"),
    nn.LocalResponseNorm: LayerAdapter(kind="norm"),
    # Their class weights are buffers, which are read in float32.
    nn.modules.loss._Loss: LayerAdapter(kind="norm"),
}
