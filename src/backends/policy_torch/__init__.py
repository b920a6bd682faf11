"""The PyTorch backend: any `nn.Module` under a dtype policy, from mixed precision to float8."""

from collections.abc import Sequence
from typing import Any

import torch

from policy_core._backend import Site, Step

from . import _casting, _quantize, _walk, _wrap
from ._adapters import LayerAdapter as LayerAdapter
from ._adapters import register_layer as register_layer
from ._float8 import share_amax as share_amax
from ._packed import PackedCodes


class TorchBackend:
    """torch's side of `policy_core._backend.Backend`; the protocol says what each method gives."""

    name = "torch"

    def is_tensor_type(self, kind: type) -> bool:
        return issubclass(kind, torch.Tensor)

    # Not a method around it: one call less for every tensor of every layer.
    convert_input = staticmethod(_casting.convert_input)

    def to_numpy(self, x: Any) -> Any:
        return _casting.to_numpy(x.unpack() if isinstance(x, PackedCodes) else x)

    def from_numpy(self, x: Any) -> torch.Tensor:
        return _casting.from_numpy(x)

    def storage_key(self, x: Any) -> object:
        return _wrap.storage_key(x)

    def quantize(
        self, x: Any, dtype: str, axes: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _quantize.quantize(x, dtype, axes)

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> torch.Tensor:
        return _quantize.dequantize(codes, scale, dtype)

    def register_layer(self, cls: Any, adapter: Any) -> None:
        register_layer(cls, adapter)

    def walk(self, model: Any) -> list[Site]:
        return _walk.walk(model)

    def validate(self, step: Step) -> None:
        _wrap.validate(step)

    def apply(self, model: Any, steps: Sequence[Step]) -> Any:
        return _wrap.apply(model, steps)

    def unwrap(self, model: Any, sites: Sequence[Site]) -> Any:
        return _wrap.unwrap(model, sites)


backend = TorchBackend()

__all__ = ["LayerAdapter", "TorchBackend", "backend", "register_layer", "share_amax"]
