"""The JAX backend: flax nnx, flax linen, equinox and raw functions, under one dtype policy."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from policy_core._backend import Site, Step

from . import _casting, _native, _packed, _quantize, _sites, _wrap
from ._arrays import QuantizedArray as QuantizedArray
from ._arrays import dot as dot
from ._arrays import dot_general as dot_general
from ._arrays import dot_general_cls as dot_general_cls
from ._arrays import einsum as einsum
from ._arrays import quantize_array as quantize_array
from ._arrays import training_dot as training_dot
from ._casting import cast_tree as cast_tree
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._ops import Array
from ._quantize import dequantize as dequantize
from ._states import apply_gradient_state as apply_gradient_state
from ._states import trainable as trainable
from ._trees import Parameters as Parameters
from ._trees import quantize as quantize


class JaxBackend:
    """JAX's side of `policy_core._backend.Backend`; the protocol says what each method gives."""

    name = "jax"
    DynamicLossScale = DynamicLossScale

    def is_tensor_type(self, kind: type) -> bool:
        return issubclass(kind, (jax.Array, jax.core.Tracer))

    # Not a method around it: one call less for every tensor of every layer.
    convert_input = staticmethod(_casting.convert_input)

    def to_numpy(self, x: Any) -> "np.ndarray":
        return np.asarray(x.read() if isinstance(x, _sites.Stored) else x)

    def from_numpy(self, x: "np.ndarray") -> Array:
        return _casting.from_numpy(x)

    def storage_key(self, x: Any) -> object:
        return _wrap.storage_key(x)

    def quantize(self, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
        return _quantize.quantize(x, dtype, axes)

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> Array:
        return _quantize.dequantize(codes, scale, dtype)

    def walk(self, model: Any) -> list[Site]:
        return _wrap.walk(model)

    def validate(self, step: Step) -> None:
        _sites.validate(step)

    def apply(self, model: Any, steps: Sequence[Step]) -> Any:
        return _wrap.apply(model, steps)

    def unwrap(self, model: Any, sites: Sequence[Site]) -> Any:
        return _wrap.unwrap(model, sites)


backend = JaxBackend()


def register() -> str:
    """Makes the CPU kernels known to XLA, for exported programs that call them.

    Wrapping a model does this too; a process that only loads a program must ask for it.

    Returns:
        Why they cannot be called here; `""` if they can.
    """
    return _native.reason_against()


def export_checks() -> list[Any]:
    """Gives the `disabled_checks` that let `jax.export.export` write calls of the kernels."""
    names = (_native.TARGET, _packed.UNPACK_TARGET, _native.ENCODE_TARGET)
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


# What needs a framework that may not be installed is imported when it is asked for.
_LAZY = {
    "Codes": "_nnx_layers",
    "Float8GradientState": "_nnx_layers",
    "Float8State": "_nnx_layers",
    "with_state": "_equinox",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


__all__ = [
    "DynamicLossScale",
    "JaxBackend",
    "Parameters",
    "QuantizedArray",
    "apply_gradient_state",
    "backend",
    "cast_tree",
    "dequantize",
    "dot",
    "dot_general",
    "dot_general_cls",
    "einsum",
    "export_checks",
    "quantize",
    "quantize_array",
    "register",
    "trainable",
    "training_dot",
]
