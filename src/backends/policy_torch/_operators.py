"""The operators of `policy_core_v1`: their schemas, and what each is on each device.

They are opaque to torch.compile and torch.export, and take any strides and any leading axes. Those of
plain codes run the native kernels on a CPU where these are faster than torch's own routines, on CUDA
torch's `_int_mm` and `_scaled_mm`, elsewhere plain torch. On a CPU they are those in C of csrc/, or
the same in Python where `_stable.reason_against()` says why.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from policy_core import _scaling

from . import _emulation, _native, _scaled_mm, _stable
from ._ops import dtype_name, ops_for
from ._stable import OPERATIONS

LIBRARY = torch.library.Library("policy_core_v1", "DEF")
"""Kept for the life of the process: the operators go with it."""

_END = "Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor"
_PACKED = "Tensor packed, int n, int k, ScalarType codes"
_SCHEMAS = {
    "linear_s8": f"(Tensor x, Tensor codes, {_END}",
    "linear_s8w": f"(Tensor x, Tensor codes, {_END}",
    "linear_f8": f"(Tensor x_codes, Tensor x_scale, Tensor codes, {_END}",
    "linear_f8w": f"(Tensor x, Tensor codes, {_END}",
    "packed_linear_s8": f"(Tensor x, {_PACKED}, {_END}",
    "packed_linear_s8w": f"(Tensor x, {_PACKED}, {_END}",
    "packed_linear_f8": f"(Tensor x, Tensor? x_scale, {_PACKED}, {_END}",
    "packed_linear_f8w": f"(Tensor x, {_PACKED}, {_END}",
    "unpack": f"({_PACKED}) -> Tensor",
    "packed_rows": f"(Tensor ids, {_PACKED}, Tensor scale, ScalarType dtype) -> Tensor",
    "encode_f8": "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    "scale_f8": "(Tensor x, ScalarType dtype) -> Tensor",
    "quantize_rows_f8": "(Tensor x) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


def _of_rows(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gives a product of matrices that takes any leading axes."""

    def product(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.ndim == 2:
            return call(x, *args)
        y = call(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), *args)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return product


def _codes_in_python(operation: str, *args: Any) -> torch.Tensor:
    """`linear_*` on a CPU: the kernels by way of Python, or plain torch."""
    if not _native.outruns_torch(operation):
        return _PLAIN[operation](*args)
    *rows, codes, scale, bias, dtype = args
    x, x_scale = rows if operation == "linear_f8" else (*rows, None)
    packed = _native.pack(codes)
    n, kind = codes.shape[0], codes.dtype
    return _native.linear(operation, x, x_scale, packed, n, kind, scale, bias, dtype)


def _packed_in_python(operation: str, *args: Any) -> torch.Tensor:
    """`packed_linear_*` on a CPU: the kernels by way of Python."""
    *rows, packed, n, k, codes, scale, bias, dtype = args
    x, x_scale = rows if operation == "linear_f8" else (*rows, None)
    if x.shape[-1] != k:
        raise ValueError(f"Expected an input of shape (..., {k}). Received shape {tuple(x.shape)}.")
    if operation == "linear_f8" and x.element_size() > 1:
        if x_scale is None:
            x, x_scale = _native.quantize_rows_f8(x)
        else:
            x = _native.encode_f8(x, x_scale, torch.float8_e4m3fn)
    return _native.linear(operation, x, x_scale, packed, n, codes, scale, bias, dtype)


def scale_in_torch(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`scale_f8` on any device."""
    ops = ops_for(x)
    scale: torch.Tensor = _scaling.scale_of(ops, ops.amax_of_all(x), dtype_name(dtype))
    return scale


def _on_cuda(operation: str, *args: Any) -> torch.Tensor:
    if operation == "linear_f8" and _scaled_mm.supported("cuda"):
        return _scaled_mm.linear_f8(*args)
    return _PLAIN[operation](*args)


def _fake(*args: Any) -> torch.Tensor:
    *tensors, codes, _, _, dtype = args
    return tensors[0].new_empty((*tensors[0].shape[:-1], codes.shape[0]), dtype=dtype)


def _fake_packed(x: torch.Tensor, *args: Any) -> torch.Tensor:
    n, _, _, _, _, dtype = args[-6:]
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


def _fake_unpack(packed: torch.Tensor, n: int, k: int, codes: torch.dtype) -> torch.Tensor:
    return packed.new_empty((n, k), dtype=codes)


def _fake_packed_rows(ids: torch.Tensor, packed: Any, n: int, k: int, *args: Any) -> torch.Tensor:
    return ids.new_empty((*ids.shape, k), dtype=args[-1])


def _fake_scale_f8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


def _fake_encode_f8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_quantize_rows_f8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)


def _vmapped(name: str, info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    """The operators whose first argument is one of rows: a batch of rows is more rows."""
    x_scale = args[1] if name.endswith("linear_f8") else None
    scaled_by_row = x_scale is not None and x_scale.numel() > 1
    if all(dim is None for dim in in_dims[1:]) and not scaled_by_row:
        return op(name)(args[0].movedim(in_dims[0], 0), *args[1:]), 0
    return _one_by_one(op(name), info, in_dims, args), 0


def _vmapped_encode_f8(
    info: Any, in_dims: Any, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    x_dim, scale_dim, _ = in_dims
    encode = op("encode_f8")
    if scale_dim is None:
        return encode(x.movedim(x_dim, 0), scale, dtype), 0
    xs = [x] * info.batch_size if x_dim is None else x.unbind(x_dim)
    return torch.stack(
        [encode(*one, dtype) for one in zip(xs, scale.unbind(scale_dim), strict=True)]
    ), 0


def _vmapped_scale_f8(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    return _one_by_one(op("scale_f8"), info, in_dims, args), 0


def _vmapped_quantize_rows_f8(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
    codes, scale = op("quantize_rows_f8")(x.movedim(in_dims[0], 0))
    return (codes, scale.reshape(info.batch_size, -1)), (0, 0)


def _one_by_one(
    call: Callable[..., torch.Tensor], info: Any, in_dims: Any, args: Any
) -> torch.Tensor:
    """Gives an operator's results for each example, one after the other."""
    return torch.stack(
        [
            call(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
    )


def op(name: str) -> Callable[..., Any]:
    """Gives an operator by its name."""
    found: Callable[..., Any] = getattr(torch.ops.policy_core_v1, name).default
    return found


_PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "linear_s8": _emulation.linear_s8,
    "linear_s8w": _emulation.linear_w,
    "linear_f8": _emulation.linear_f8,
    "linear_f8w": _emulation.linear_w,
}

IN_PYTHON: dict[str, Callable[..., Any]] = {
    **{one: _of_rows(functools.partial(_codes_in_python, one)) for one in OPERATIONS},
    **{f"packed_{one}": functools.partial(_packed_in_python, one) for one in OPERATIONS},
    "unpack": _native.unpack,
    "packed_rows": _native.packed_rows,
    "encode_f8": _native.encode_f8,
    "scale_f8": scale_in_torch,
    "quantize_rows_f8": _native.quantize_rows_f8,
}
"""The operators on a CPU where there are none in C."""


def _register() -> None:
    fakes: dict[str, Callable[..., Any]] = {
        "unpack": _fake_unpack,
        "packed_rows": _fake_packed_rows,
        "encode_f8": _fake_encode_f8,
        "scale_f8": _fake_scale_f8,
        "quantize_rows_f8": _fake_quantize_rows_f8,
    }
    vmaps: dict[str, Callable[..., Any]] = {
        "encode_f8": _vmapped_encode_f8,
        "scale_f8": _vmapped_scale_f8,
        "quantize_rows_f8": _vmapped_quantize_rows_f8,
    }
    for name in _SCHEMAS:
        full = f"policy_core_v1::{name}"
        fake = fakes.get(name, _fake_packed if name.startswith("packed") else _fake)
        torch.library.register_fake(full, fake, lib=LIBRARY)
        if name != "unpack":
            vmap = vmaps.get(name, functools.partial(_vmapped, name))
            torch.library.register_vmap(full, vmap, lib=LIBRARY)
    for name in OPERATIONS:
        LIBRARY.impl(name, _of_rows(functools.partial(_on_cuda, name)), "CUDA")
        LIBRARY.impl(name, _of_rows(_PLAIN[name]), "CompositeExplicitAutograd")
    if _stable.reason_against():
        for name, call in IN_PYTHON.items():
            LIBRARY.impl(name, call, "CPU")


_register()
