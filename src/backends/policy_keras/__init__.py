"""The Keras backend: Keras layers under a dtype policy, on whichever framework Keras runs."""

from collections.abc import Sequence
from typing import Any

import keras

from policy_core._backend import Site, Step

from . import _casting, _quantize, _walk, _wrap
from ._adapters import LayerAdapter as LayerAdapter
from ._adapters import register_layer as register_layer
from ._keras import KerasTensor, KerasVariable
from ._kernels import FRAMEWORK
from ._policies import from_keras as from_keras
from ._policies import to_keras as to_keras
from ._stored import Stored


class KerasBackend:
    """Keras's side of `policy_core._backend.Backend`; the protocol says what each method gives.

    Tensors belong to the framework that Keras runs on, and its adapter does what is asked of them
    here. Symbolic tensors and variables are Keras's own.
    """

    name = "keras"

    def is_tensor_type(self, kind: type) -> bool:
        return issubclass(kind, (KerasTensor, KerasVariable))

    convert_input = staticmethod(_casting.convert_input)

    def to_numpy(self, x: Any) -> Any:
        return _casting.to_numpy(x.read() if isinstance(x, Stored) else x)

    def from_numpy(self, x: Any) -> Any:
        return FRAMEWORK.from_numpy(x)

    def storage_key(self, x: Any) -> object:
        return _wrap.storage_key(x)

    def quantize(self, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Any, Any]:
        return _quantize.quantize(x, dtype, axes)

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> Any:
        return _quantize.dequantize(codes, scale, dtype)

    def register_layer(self, cls: Any, adapter: Any) -> None:
        register_layer(cls, adapter)

    def read_policy(self, policy: Any) -> Any:
        kinds = (keras.DTypePolicy, keras.dtype_policies.DTypePolicyMap)
        return from_keras(policy) if isinstance(policy, kinds) else None

    def rules_of(self, policy: Any, sites: list[Site]) -> Any:
        return _walk.rules_of(policy, sites)

    def walk(self, model: Any) -> list[Site]:
        return _walk.walk(model)

    def validate(self, step: Step) -> None:
        _wrap.validate(step)

    def apply(self, model: Any, steps: Sequence[Step]) -> Any:
        return _wrap.apply(model, steps)

    def unwrap(self, model: Any, sites: Sequence[Site]) -> Any:
        return _wrap.unwrap(model, sites)


backend = KerasBackend()

__all__ = [
    "KerasBackend",
    "LayerAdapter",
    "backend",
    "from_keras",
    "register_layer",
    "to_keras",
]
