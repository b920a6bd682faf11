"""Products with quantized weights in plain torch: for devices and builds without native kernels.

Each gives what docs/numerics.md says. For int8 the sums are exact, so the bits are the reference's.
"""

import functools
from collections.abc import Callable

import torch

from ._ops import ops_for
from ._quantize import dequantize

MAX_CONTRACTION = 131_072
"""So many int8 products always fit an int32 sum; longer ones are added in float32."""

EXACT_IN_FLOAT32 = 1024
"""So many int8 products, each at most 127 squared, have a sum below 2**24."""

BLOCK_ROWS = 1024
"""So many rows of a weight are decoded at a time."""


def linear_s8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `x @ (codes * scale).T + bias` with the rows of `x` quantized on the way.

    Args:
        x: Floats of shape (m, k).
        codes: int8 of shape (n, k).
        scale: float32 of shape (n,).
        bias: Floats of shape (n,), or None.
        dtype: The dtype of the result.
    """
    from policy_core import _scaling

    x_codes, x_scale = _scaling.quantize(ops_for(x), x, "int8", (1,))
    total: torch.Tensor | None = None
    for start in range(0, max(x.shape[1], 1), MAX_CONTRACTION):
        part = slice(start, start + MAX_CONTRACTION)
        exact = product_s8(x_codes[:, part], codes[:, part]).float()
        total = exact if total is None else total + exact
    assert total is not None
    return scaled(total, x_scale * scale, bias, dtype)


def product_s8(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Gives the exact `x @ codes.T` of int8 matrices, in int32, by the fastest way there is."""
    if int_mm_is_exact(x.device.type):
        return int_mm(x, codes)
    total = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT_IN_FLOAT32):
        part = slice(start, start + EXACT_IN_FLOAT32)
        total += (x[:, part].float() @ codes[:, part].float().T).to(torch.int32)
    return total


def int_mm(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Gives `x @ codes.T` by `torch._int_mm`, padded to the sizes that it demands.

    CUDA's takes more than 16 rows, and multiples of 8 of the other sizes; zeros change no sum.
    """
    m, n, k = x.shape[0], codes.shape[0], x.shape[1]
    x = padded(x, max(m, 17), -(-max(k, 1) // 8) * 8)
    codes = padded(codes, -(-max(n, 1) // 8) * 8, -(-max(k, 1) // 8) * 8)
    return torch._int_mm(x, codes.t())[:m, :n]


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Gives a matrix with zeros below and to the right; itself if it has that shape."""
    if x.shape == (rows, columns):
        return x.contiguous()
    # Through bytes: float8 has no fill.
    result = torch.zeros(rows, columns, dtype=torch.uint8, device=x.device).view(x.dtype)
    result[: x.shape[0], : x.shape[1]] = x
    return result


def failure_of(probe: Callable[[], bool]) -> str:
    """Says why an operator of torch cannot be used on a device, in torch's words; `""` if it can.

    Args:
        probe: Runs the operator, and says whether its result is right.
    """
    try:
        return "" if probe() else "its result is not exact"
    except torch.OutOfMemoryError:
        raise  # it says nothing about the operator
    except RuntimeError as error:
        # torch knows which devices have an operator only by trying. Nothing is lost: the report
        # names what runs instead, and this reason.
        return str(error).partition("\n")[0]


@functools.cache
def int_mm_failure(device_type: str) -> str:
    """Says why `torch._int_mm` is not used on a device; `""` if it runs there with exact sums.

    Measured on the values with which instructions that saturate in between go wrong.
    """
    if device_type not in ("cpu", "cuda"):
        return "torch._int_mm is used on CPUs and on CUDA"

    def probe() -> bool:
        x = torch.full((32, 512), -127, dtype=torch.int8, device=device_type)
        codes = torch.full((64, 512), 127, dtype=torch.int8, device=device_type)
        return bool((torch._int_mm(x, codes.t()) == -127 * 127 * 512).all())

    return failure_of(probe)


def int_mm_is_exact(device_type: str) -> bool:
    """Says whether `torch._int_mm` runs on a device and gives exact sums."""
    return not int_mm_failure(device_type)


def linear_w(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `(x @ codes.T) * scale + bias`; arguments as for `linear_s8`, codes of any dtype."""
    inside = _inside(x.dtype)
    x = x.to(inside)
    parts = [x @ part.to(inside).T for part in codes.split(BLOCK_ROWS)]
    total = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return scaled(total.float(), scale, bias, dtype)


def linear_f8(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `(x_codes @ codes.T) * (x_scale * scale) + bias`.

    Args:
        x_codes: A float8 dtype, of shape (m, k).
        x_scale: float32 of shape (m,), or () for one scale of the tensor.
        codes: A float8 dtype, of shape (n, k).
        scale: float32 of shape (n,), or ().
        bias: Floats of shape (n,), or None.
        dtype: The dtype of the result; a bfloat16 product is rounded to it before the scales too.
    """
    inside = _inside(dtype)
    total = (x_codes.to(inside) @ codes.to(inside).T).float()
    return scaled(total, scale_product(x_scale, scale), bias, dtype)


def scale_product(x_scale: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Gives `x_scale * scale` with a row's scale in a column of its own."""
    return (x_scale if x_scale.ndim == 0 else x_scale[:, None]) * scale


def scaled(
    total: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Scales, then adds the bias, each rounded to float32 by itself, then casts once."""
    y = total * scale
    return (y if bias is None else y + bias.float()).to(dtype)


def dequantized_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Gives `codes * scale` in float32 for a scale per row, or one for all."""
    return dequantize(codes, scale if scale.ndim == 0 else scale[:, None])


def _inside(dtype: torch.dtype) -> torch.dtype:
    """Gives the dtype to multiply in: both float8 formats and int8 fit in bfloat16 exactly.

    Sums of float16 would overflow.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
