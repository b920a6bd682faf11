"""What JAX hands to TensorFlow by `model.export`: plain codes, which need no unpacking there."""

import contextlib
from collections.abc import Iterator
from typing import Any

from . import _keras
from ._kernels import PACKED
from ._layers import KeepsCodes
from ._stored import quantized_tensors


@contextlib.contextmanager
def plain_codes(model: Any) -> Iterator[None]:
    """Makes layers keep int8 codes in the files' order of bytes, for as long as it is open.

    Float8 codes stay packed: TensorFlow's variables hold them as bytes alone.
    """
    packed: list[tuple[Any, Any]] = []
    try:
        for layer in model._flatten_layers():
            variable = vars(layer).get(PACKED) if isinstance(layer, KeepsCodes) else None
            if variable is None or layer.policy_plan.weight_codes != "int8":
                continue
            # Layers with tied weights have one variable.
            if variable.dtype != "int8":
                packed.append((variable, _keras.raw(variable)))
                _keras.refill(variable, quantized_tensors(layer)["weight"].read())
        yield
    finally:
        for variable, value in packed:
            _keras.refill(variable, value)
