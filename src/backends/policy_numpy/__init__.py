"""The reference backend: plain, exact, always there; the oracle for all the others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from policy_core._backend import Site, Step

from . import _casting, _kernels, _quantize, _wrap
from ._layers import Operands as Operands
from ._layers import linear as linear
from ._layers import linear_gradient as linear_gradient
from ._models import Dense as Dense
from ._models import Embedding as Embedding
from ._models import Layer as Layer
from ._models import LayerNorm as LayerNorm
from ._models import Sequential as Sequential
from ._ops import Array
from ._quantize import dequantize as dequantize
from ._quantize import encode as encode
from ._quantize import quantize as quantize


class NumpyBackend:
    """numpy's side of `policy_core._backend.Backend`; the protocol says what each method gives."""

    name = "numpy"

    def is_tensor_type(self, kind: type) -> bool:
        return issubclass(kind, (np.ndarray, np.generic))

    # Not a method around it: one call less for every tensor of every layer.
    convert_input = staticmethod(_casting.convert_input)

    def to_numpy(self, x: Any) -> Array:
        return np.asarray(_kernels.plain(x))

    def from_numpy(self, x: Array) -> Array:
        return x

    def storage_key(self, x: Array) -> object:
        return _wrap.storage_key(x)

    def quantize(self, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
        return _quantize.quantize(x, dtype, axes)

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> Array:
        return _quantize.dequantize(codes, scale, dtype)

    def walk(self, model: Any) -> list[Site]:
        return _wrap.walk(model)

    def validate(self, step: Step) -> None:
        _wrap.validate(step)

    def apply(self, model: Any, steps: Sequence[Step]) -> Any:
        return _wrap.apply(model, steps)

    def unwrap(self, model: Any, sites: Sequence[Site]) -> Any:
        return _wrap.unwrap(model, sites)


backend = NumpyBackend()

__all__ = [
    "Dense",
    "Embedding",
    "Layer",
    "LayerNorm",
    "NumpyBackend",
    "Operands",
    "Sequential",
    "backend",
    "dequantize",
    "encode",
    "linear",
    "linear_gradient",
    "quantize",
]
