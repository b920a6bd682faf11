"""Tensors to codes and scales and back, for every code dtype; the formulas are the core's."""

import torch

from policy_core import _scaling

from ._ops import TORCH_DTYPES, ops_for

BLOCK = 1 << 18
"""About how many elements are quantized at a time, so that no copies of a whole weight arise."""


@torch.no_grad()
def quantize(
    x: torch.Tensor, dtype: str, axes: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the codes of a tensor and their scales, `x ≈ codes * scale`.

    Args:
        x: Floats of any dtype and shape.
        dtype: `"int8"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
        axes: The axes over which elements share a scale.

    Returns:
        Codes of `dtype` and the shape of `x`, and float32 scales in which `axes` have size 1:
        positive and finite, but NaN for a block that holds a NaN or an infinity.

    Raises:
        ValueError: `dtype` is none of these.
    """
    if dtype not in ("int8", "float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"Cannot quantize to {dtype!r}. Expected 'int8', 'float8_e4m3fn' or 'float8_e5m2'."
        )
    ops = ops_for(x)
    if 0 in axes or x.ndim < 2 or x.numel() <= BLOCK:
        return _scaling.quantize(ops, x, dtype, axes)
    codes = torch.empty(x.shape, dtype=TORCH_DTYPES[dtype], device=x.device)
    scale = torch.empty(
        [1 if i in axes else n for i, n in enumerate(x.shape)],
        dtype=torch.float32,
        device=x.device,
    )
    rows = max(1, BLOCK // x[0].numel())
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        codes[part], scale[part] = _scaling.quantize(ops, x[part], dtype, axes)
    return codes, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: str = "float32") -> torch.Tensor:
    """Gives `codes * scale`, computed in float32, in `dtype`."""
    result: torch.Tensor = _scaling.dequantize(ops_for(codes), codes, scale, dtype)
    return result


@torch.no_grad()
def encode(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gives the float8 codes of a tensor under one scale; what is too large saturates."""
    ops = ops_for(x)
    if torch.compiler.is_compiling() or x.ndim < 2 or x.numel() <= BLOCK:
        codes: torch.Tensor = _scaling.encode(ops, x, scale, dtype)
        return codes
    # Blocks that stay in the cache: several times faster than passes over a whole weight.
    codes = torch.empty(x.shape, dtype=TORCH_DTYPES[dtype], device=x.device)
    rows = max(1, BLOCK // x[0].numel())
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        codes[part] = _scaling.encode(ops, x[part], scale, dtype)
    return codes
