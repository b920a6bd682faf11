"""Casts of tensors to a compute dtype, and the way between tensors and numpy arrays."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from policy_core import _casting
from policy_core._dtypes import DTYPES

from ._ops import TORCH_DTYPES, dtype_name

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_TARGETS = {
    name: TORCH_DTYPES[name]
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
# numpy knows these only through ml_dtypes: their bits travel as integers.
_AS_BITS = {
    torch.bfloat16: (torch.int16, np.int16),
    **{
        TORCH_DTYPES[name]: (torch.uint8, np.uint8)
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if name in TORCH_DTYPES
    },
}


def convert_input(x: Any, dtype: str | None) -> Any:
    """Gives a tensor cast to `dtype` if it is a float of at least 16 bits, else itself.

    Args:
        x: A tensor, which stays on its device, or a numpy array, which becomes a tensor on the CPU.
        dtype: A canonical float dtype name, or None to cast nothing. Into a float8, which torch's
            cast overflows to NaN, values saturate.

    Raises:
        ValueError: `dtype` is a float format that no mode uses; torch has no such dtype.
    """
    if not isinstance(x, torch.Tensor):
        x = from_numpy(np.asarray(x))
    if dtype is None:
        return x
    target = _TARGETS.get(dtype)
    if target is None:
        raise ValueError(f"Cannot cast to {dtype!r}. Expected one of {sorted(_TARGETS)}.")
    if x.dtype == target or x.dtype not in CASTABLE:
        return x
    if DTYPES[dtype].bits < 16:
        largest = DTYPES[dtype].max
        return x.float().clamp(-largest, largest).to(target)
    return x.to(target)


def cast_tensor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives a float tensor of at least 16 bits in `dtype`; any other tensor as it is."""
    return x.to(dtype) if x.dtype != dtype and x.dtype in CASTABLE else x


def cast_nest(x: Any, dtype: torch.dtype) -> Any:
    """Gives a nest with its float tensors in `dtype`; numpy arrays in it stay what they are."""
    if isinstance(x, torch.Tensor):
        return cast_tensor(x, dtype)
    if x is None or isinstance(x, (bool, int, float, str, np.ndarray)):
        return x
    if type(x) is tuple:
        return tuple([cast_nest(item, dtype) for item in x])
    if type(x) is list:
        return [cast_nest(item, dtype) for item in x]
    if type(x) is dict:
        return {key: cast_nest(value, dtype) for key, value in x.items()}
    return _casting.convert(x, dtype_name(dtype), True)


def to_numpy(x: torch.Tensor) -> Any:
    """Gives a tensor as a numpy array, bit for bit (with ml_dtypes' dtypes)."""
    x = x.detach().resolve_conj().resolve_neg().cpu()
    if x.dtype not in _AS_BITS:
        return x.numpy()
    name = dtype_name(x.dtype)
    return x.view(_AS_BITS[x.dtype][0]).numpy().view(np.dtype(getattr(ml_dtypes, name)))


def from_numpy(x: Any) -> torch.Tensor:
    """Gives a numpy array as a tensor, bit for bit; it shares memory where both allow that.

    Raises:
        ValueError: torch has no such dtype.
    """
    name = x.dtype.name
    if name not in TORCH_DTYPES:
        raise ValueError(
            f"torch has no dtype {name!r}. Expected one of {sorted(TORCH_DTYPES)}; convert the "
            "array, or leave it out."
        )
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    target = TORCH_DTYPES[name]
    # torch warns of arrays that it could write to but must not, and refuses negative strides.
    if not x.flags.writeable or any(stride < 0 for stride in x.strides):
        x = x.copy()
    if target not in _AS_BITS:
        return torch.from_numpy(x)
    as_torch, as_numpy = _AS_BITS[target]
    del as_torch
    return torch.from_numpy(x.view(as_numpy)).view(target)
