"""float8 products by `torch._scaled_mm`, padded to the sizes that it demands."""

import functools

import torch

from ._emulation import failure_of, padded, scale_product, scaled


@functools.cache
def failure(device: str) -> str:
    """Says why `torch._scaled_mm` is not used on a kind of device; `""` if it works: measured."""
    if device != "cuda":
        # The CPU's is there, but slower by far than plain torch on decoded codes.
        return "torch._scaled_mm is used on CUDA alone"

    def probe() -> bool:
        codes = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        return bool((product(codes, codes) == 16).all())

    return failure_of(probe)


def supported(device: str) -> bool:
    """Says whether `torch._scaled_mm` multiplies float8 on a kind of device."""
    return not failure(device)


def linear_f8(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `(x_codes @ codes.T) * (x_scale * scale) + bias`, as `_kernels.linear_f8`."""
    # Scales are applied here, not inside: rounded as everywhere, for scalars and rows alike.
    return scaled(product(x_codes, codes), scale_product(x_scale, scale), bias, dtype)


def product(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Gives `x @ codes.T` in float32. `_scaled_mm` takes multiples of 16, and a column-major right
    side; zeros change no sum.
    """
    m, n, k = x.shape[0], codes.shape[0], x.shape[1]
    sizes = [max(-(-size // 16), 1) * 16 for size in (m, n, k)]
    one = torch.ones((), dtype=torch.float32, device=x.device)
    left = padded(x, sizes[0], sizes[2])
    right = padded(codes, sizes[1], sizes[2])
    y = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=False)
    return y[:m, :n]
