"""The TensorFlow backend: any `tf.Module` under a dtype policy, from mixed precision to float8."""

from collections.abc import Sequence
from typing import Any

from policy_core._backend import Site, Step

from . import _casting, _native, _quantize, _walk, _wrap
from ._adapters import LayerAdapter as LayerAdapter
from ._adapters import register_layer as register_layer
from ._delayed import training as training
from ._modules import Embedding as Embedding
from ._modules import LayerNorm as LayerNorm
from ._modules import Linear as Linear
from ._modules import Weight as Weight
from ._modules import linear as linear
from ._ops import Tensor


class TensorFlowBackend:
    """TensorFlow's side of `policy_core._backend.Backend`; the protocol says what each method gives."""

    name = "tensorflow"

    def is_tensor_type(self, kind: type) -> bool:
        return issubclass(kind, _casting.KINDS)

    # Not a method around it: one call less for every tensor of every layer.
    convert_input = staticmethod(_casting.convert_input)

    def to_numpy(self, x: Any) -> Any:
        return _wrap.as_numpy(x)

    def from_numpy(self, x: Any) -> Tensor:
        return _casting.from_numpy(x)

    def storage_key(self, x: Any) -> object:
        return _wrap.storage_key(x)

    def quantize(self, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return _quantize.quantize(x, dtype, axes)

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> Tensor:
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


backend = TensorFlowBackend()


def register() -> str:
    """Makes the CPU kernels known to TensorFlow, for saved programs that call them.

    Importing this package does it.

    Returns:
        Why they cannot be called here; `""` if they can.
    """
    return _native.reason_against()


register()

__all__ = [
    "Embedding",
    "LayerAdapter",
    "LayerNorm",
    "Linear",
    "TensorFlowBackend",
    "Weight",
    "backend",
    "linear",
    "register",
    "register_layer",
    "training",
]
