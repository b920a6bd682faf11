"""Tensors to codes and scales and back, by the adapter of the framework that Keras runs on."""

from typing import Any

from ._kernels import FRAMEWORK


def quantize(x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Gives the codes of a tensor and their scales, `x ≈ codes * scale`."""
    return FRAMEWORK.quantize(x, dtype, axes)


def dequantize(codes: Any, scale: Any, dtype: str = "float32") -> Any:
    """Gives `codes * scale`, computed in float32, in `dtype`."""
    return FRAMEWORK.dequantize(codes, scale, dtype)
