"""The TensorFlow backend: any `tf.Module` under a dtype policy, from mixed precision to float8."""

from typing import Any

from . import _casting, _native, _quantize
from ._delayed import training as training
from ._ops import Tensor


class TensorFlowBackend:
    """TensorFlow's side of `policy_core._backend.Backend`; the protocol says what each method gives."""

    name = "tensorflow"

    def is_tensor_type(self, kind: type) -> bool:
        return issubclass(kind, _casting.KINDS)

    # Not a method around it: one call less for every tensor of every layer.
    convert_input = staticmethod(_casting.convert_input)

    def to_numpy(self, x: Any) -> Any:
        return _casting.to_numpy(x)

    def from_numpy(self, x: Any) -> Tensor:
        return _casting.from_numpy(x)

    def quantize(self, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return _quantize.quantize(x, dtype, axes)

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> Tensor:
        return _quantize.dequantize(codes, scale, dtype)

    def storage_key(self, x: Any) -> object:
        return id(x)

    def walk(self, model: Any) -> list[Any]:
        raise TypeError("The TensorFlow backend serves tensors, and no models yet.")

    def validate(self, step: Any) -> None:
        raise TypeError("The TensorFlow backend serves tensors, and no models yet.")

    apply = unwrap = walk


backend = TensorFlowBackend()
_native.reason_against()
