"""The array functions of `policy_core._scaling.Ops`, in torch, and torch's dtypes by name."""

from typing import Any

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex64",
        "complex128",
    )
    if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Gives the canonical name of a torch dtype; ValueError for one that has none."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise ValueError(f"Expected one of {sorted(TORCH_DTYPES)}. Received: {dtype}") from None


class TorchOps:
    """torch's side of `Ops` on one device; the protocol says what each function gives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def cast(self, x: Any, dtype: str) -> Any:
        y = x.to(TORCH_DTYPES[dtype])
        if dtype == "float8_e5m2":
            # torch's NaN has the bits 0x7f, everyone else's 0x7e.
            bits = y.view(torch.uint8)
            y = (bits - ((bits & 0x7F) == 0x7F).to(torch.uint8)).view(y.dtype)
        return y

    def amax(self, x: Any, axes: tuple[int, ...]) -> Any:
        if x.numel() == 0:
            shape = [1 if i in axes else n for i, n in enumerate(x.shape)]
            return torch.zeros(shape, dtype=x.dtype, device=x.device)
        if len(axes) == x.ndim > 1:
            # One pass, without a copy of |x|.
            low, high = torch.aminmax(x)
            return torch.maximum(high, -low).abs().reshape([1] * x.ndim)
        return torch.amax(x.abs(), axes, keepdim=True)

    def amax_of_all(self, x: Any) -> Any:
        """Gives the amax of a whole tensor, float32 of shape ()."""
        # The largest of some floats is one of them: no float32 copy of all is needed.
        return self.amax(x, tuple(range(x.ndim))).reshape(()).float()

    def maximum(self, x: Any, y: Any) -> Any:
        return torch.maximum(x, y)

    def clip(self, x: Any, low: float, high: float) -> Any:
        return torch.clamp(x, low, high)

    def rint(self, x: Any) -> Any:
        return torch.round(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return torch.where(condition, x, y)

    def isfinite(self, x: Any) -> Any:
        # torch.isfinite is four operations.
        return (x - x) == 0

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        return torch.full(shape, value, dtype=torch.float32, device=self.device)

    def prepend(self, first: Any, rest: Any) -> Any:
        return torch.cat([first.reshape(1), rest[:-1]])


def ops_for(x: torch.Tensor) -> TorchOps:
    """Gives the array functions for tensors where `x` is."""
    return TorchOps(x.device)
