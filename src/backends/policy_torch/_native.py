"""The native CPU kernels on tensors' own memory, and weights packed once for them.

The only file that calls `policy_kernels`' products.
"""

import functools
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import policy_kernels
from policy_kernels._loader import check, library

from ._casting import to_numpy
from ._ops import dtype_name

_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}


PACKING_NOTE = "the second call adds a packed copy of the codes, as large as they are"


@functools.cache
def outruns_torch(operation: str) -> bool:
    """Says whether a native kernel is there and is not the scalar one, which torch outruns."""
    if not policy_kernels.available():
        return False
    return not policy_kernels.kernel_name(operation).endswith("scalar")


# Packed weights, kept as long as the codes live.

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class _Packed:
    """What is known about one tensor of codes.

    Attributes:
        alive: Tells whether the codes' memory is still in use.
        version: torch's count of changes to the codes when they were seen.
        weight: The packed weight; None for codes that were seen once.
    """

    def __init__(self, alive: Any, version: int, weight: Any) -> None:
        self.alive = alive
        self.version = version
        self.weight = weight


_PACKED: dict[_Key, _Packed] = {}


def _packed(codes: torch.Tensor) -> Any:
    """Gives codes in the kernels' layout: made anew at the first use, kept from the second on.

    Codes that are used once, as those of a training step, leave nothing behind.
    """
    storage = codes.untyped_storage()
    # The weak reference in the entry keeps this number from being given to another storage.
    key = (storage._cdata, codes.storage_offset(), codes.shape, codes.stride())
    version = -1 if codes.is_inference() else codes._version
    found = _PACKED.get(key)
    if found is not None and found.version == version and not found.alive.expired():
        if found.weight is None:
            found.weight = _pack(codes)
        return found.weight
    for dead in [k for k, entry in _PACKED.items() if entry.alive.expired()]:
        del _PACKED[dead]
    _PACKED[key] = _Packed(StorageWeakRef(storage), version, None)
    return _pack(codes)


def _pack(codes: torch.Tensor) -> Any:
    bits = codes.detach()
    if codes.dtype in _FORMATS:
        bits = bits.view(torch.uint8)
    # torch turns a matrix ten times faster than numpy does.
    bits = bits.contiguous()
    return policy_kernels.PackedWeight(to_numpy(bits), dtype_name(codes.dtype))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Gives a matrix itself where its rows are contiguous and do not overlap, else a copy."""
    x = x if x.dtype in _FLOATS or x.dtype in _FORMATS else x.float()
    m, k = x.shape
    usable = (k <= 1 or x.stride(1) == 1) and (m <= 1 or x.stride(0) >= k)
    return x if usable else x.contiguous()


def _stride(x: torch.Tensor) -> int:
    return max(x.stride(0), x.shape[1]) if x.shape[0] > 1 else max(x.shape[1], 1)


def _scale(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.is_contiguous() else scale.contiguous()


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None:
        return None
    return (bias if bias.dtype in _FLOATS else bias.float()).contiguous()


def _floats(
    function: Any,
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *more: int,
) -> torch.Tensor:
    """Runs a kernel that takes float rows; `more` is what it takes around the packed weight."""
    x, scale = _rows(x), _scale(scale)
    bias = _bias(bias)
    weight = _packed(codes)
    m, k = x.shape
    n = codes.shape[0]
    inside = dtype if dtype in _FLOATS else torch.float32
    y = torch.empty((m, n), dtype=inside)
    before, after = more[:1], more[1:]
    status = function(
        None,
        m,
        n,
        k,
        _FLOATS[x.dtype],
        x.data_ptr(),
        _stride(x),
        *before,
        weight._pointer,
        scale.data_ptr(),
        *after,
        0 if bias is None else _FLOATS[bias.dtype],
        None if bias is None else bias.data_ptr(),
        _FLOATS[inside],
        y.data_ptr(),
        n,
    )
    if status:
        check(status)
    return y if inside == dtype else y.to(dtype)


def encode_f8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `_kernels.encode_f8`."""
    x = x.detach().float().contiguous()
    codes = torch.empty(x.shape, dtype=dtype)
    check(
        library().pk_encode_f8(
            _FORMATS[dtype], x.numel(), x.data_ptr(), scale.item(), codes.data_ptr()
        )
    )
    return codes


def quantize_rows_f8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_kernels.quantize_rows_f8`."""
    x = x.detach().float().contiguous()
    m, k = x.shape
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(m)
    check(
        library().pk_quantize_rows_f8(
            0, m, k, x.data_ptr(), max(k, 1), codes.data_ptr(), max(k, 1), scale.data_ptr()
        )
    )
    return codes, scale


def linear_s8(*args: Any) -> torch.Tensor:
    """As `_kernels.linear_s8`."""
    return _floats(library().pk_linear_s8, *args)


def linear_s8w(*args: Any) -> torch.Tensor:
    """As `_kernels.linear_s8w`."""
    return _floats(library().pk_linear_s8w, *args)


def linear_f8w(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `_kernels.linear_f8w`."""
    function, format = library().pk_linear_f8w, _FORMATS[codes.dtype]
    return _floats(function, x, codes, scale, bias, dtype, format, scale.ndim)


def linear_f8(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `_kernels.linear_f8`."""
    x_codes, x_scale, scale = _rows(x_codes), _scale(x_scale), _scale(scale)
    bias = _bias(bias)
    weight = _packed(codes)
    m, k = x_codes.shape
    n = codes.shape[0]
    inside = dtype if dtype in _FLOATS else torch.float32
    y = torch.empty((m, n), dtype=inside)
    status = library().pk_linear_f8(
        None,
        m,
        n,
        k,
        _FORMATS[x_codes.dtype],
        x_codes.data_ptr(),
        _stride(x_codes),
        x_scale.data_ptr(),
        x_scale.ndim,
        _FORMATS[codes.dtype],
        weight._pointer,
        scale.data_ptr(),
        scale.ndim,
        0 if bias is None else _FLOATS[bias.dtype],
        None if bias is None else bias.data_ptr(),
        _FLOATS[inside],
        y.data_ptr(),
        n,
    )
    if status:
        check(status)
    return y if inside == dtype else y.to(dtype)
