"""How torch reaches a product with quantized weights on each device, as operators of torch.

The operators of `policy_core_v1` are opaque to torch.compile and torch.export, and take any strides
and any leading axes. `linear_s8`, `linear_s8w`, `linear_f8` and `linear_f8w` take plain codes: on a
CPU they run the native kernels where these are faster than torch's own routines, on CUDA torch's
`_int_mm` and `_scaled_mm`, elsewhere plain torch. `packed_linear_*` take what a layer on a CPU
keeps: codes in the kernels' layout. On a CPU the operators are those in C of csrc/, or the same in
Python where `_stable.reason_against()` says why.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

import policy_kernels
from policy_core import _scaling

from . import _emulation, _native, _quantize, _scaled_mm, _stable
from ._ops import TORCH_DTYPES, dtype_name, ops_for
from ._stable import OPERATIONS

LIBRARY = torch.library.Library("policy_core_v1", "DEF")
"""Kept for the life of the process: the operators go with it."""

# A plain value: what torch.compile traces must not ask a cached function.
_NATIVE_FLOAT8 = _native.outruns_torch("linear_f8")

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
    y: torch.Tensor = torch.ops.policy_core_v1.linear_s8.default(x, codes, scale, bias, dtype)
    return y


def linear_s8w(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `(x @ codes.T) * scale + bias`; arguments as for `linear_s8`."""
    y: torch.Tensor = torch.ops.policy_core_v1.linear_s8w.default(x, codes, scale, bias, dtype)
    return y


def linear_f8w(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `(x @ codes.T) * scale + bias` for codes of a float8 dtype; else as `linear_s8`."""
    y: torch.Tensor = torch.ops.policy_core_v1.linear_f8w.default(x, codes, scale, bias, dtype)
    return y


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
        dtype: The dtype of the result.
    """
    y: torch.Tensor = torch.ops.policy_core_v1.linear_f8.default(
        x_codes, x_scale, codes, scale, bias, dtype
    )
    return y


def packed_linear(
    operation: str,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    packed: torch.Tensor,
    shape: tuple[int, int],
    codes: torch.dtype,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives the product of an operation for a packed weight of shape (n, k), on a CPU.

    Args:
        operation: One of `OPERATIONS`; its function says what the other arguments are.
        x: Floats of shape (..., k), which `"linear_f8"` quantizes on the way; or codes.
        x_scale: For `"linear_f8"` alone: the scale of x, None for one of its own for each row.
        packed: What `_native.pack` gave.
        shape: n and k.
        codes: The dtype of what was packed.
        scale: The weight's scales.
        bias: The bias, or None.
        dtype: The dtype of the result.
    """
    op = _PACKED_OPS[operation]
    n, k = shape
    if operation == "linear_f8":
        return op(x, x_scale, packed, n, k, codes, scale, bias, dtype)
    return op(x, packed, n, k, codes, scale, bias, dtype)


def unpack(packed: torch.Tensor, n: int, k: int, codes: torch.dtype) -> torch.Tensor:
    """Gives the codes of a packed weight of shape (n, k)."""
    plain: torch.Tensor = torch.ops.policy_core_v1.unpack.default(packed, n, k, codes)
    return plain


def packed_rows(
    ids: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    k: int,
    codes: torch.dtype,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `codes[ids] * scale[ids]`, rounded once, for a packed table of shape (n, k)."""
    y: torch.Tensor = torch.ops.policy_core_v1.packed_rows.default(
        ids, packed, n, k, codes, scale, dtype
    )
    return y


def encode_f8(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gives the float8 codes of a tensor under one scale; what is too large saturates."""
    if _NATIVE_FLOAT8 and x.device.type == "cpu":
        codes: torch.Tensor = torch.ops.policy_core_v1.encode_f8.default(
            x, scale, TORCH_DTYPES[dtype]
        )
        return codes
    return _quantize.encode(x, scale, dtype)


def scale_f8(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gives the scale under which a tensor's amax is the largest code, float32 of shape ()."""
    if _NATIVE_FLOAT8 and x.device.type == "cpu":
        scale: torch.Tensor = torch.ops.policy_core_v1.scale_f8.default(x, TORCH_DTYPES[dtype])
        return scale
    return _scale_in_torch(x, TORCH_DTYPES[dtype])


def quantize_rows_f8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the float8_e4m3fn codes of a matrix, and its rows' scales, float32 of shape (m,)."""
    if _NATIVE_FLOAT8 and x.device.type == "cpu":
        codes, scale = torch.ops.policy_core_v1.quantize_rows_f8.default(x)
        return codes, scale
    codes, scale = _scaling.quantize(ops_for(x), x, "float8_e4m3fn", (1,))
    return codes, scale.reshape(-1)


def kernel_table(device: str) -> tuple[tuple[str, str, str], ...]:
    """Gives for each operation the kernel that runs on a kind of device, for a LayerSpec."""
    rows = [
        ("float", "torch", ""),
        ("rows_s8", "rows_s8_torch", ""),
        ("rows_f8", "rows_f8_torch", ""),
    ]
    rows += [(operation, *_kernel(operation, device)) for operation in OPERATIONS]
    return tuple(rows)


def _kernel(operation: str, device: str) -> tuple[str, str]:
    if device == "cpu" and _native.outruns_torch(operation):
        why = _stable.reason_against()
        note = f"called by operators in Python, some microseconds slower: {why}" if why else ""
        return policy_kernels.kernel_name(operation), note
    if operation == "linear_s8" and _emulation.int_mm_is_exact(device):
        return "linear_s8_int_mm", ""
    if operation == "linear_f8" and _scaled_mm.supported(device):
        return "linear_f8_scaled_mm", ""
    reason = "the device has no such instruction" if device != "cpu" else _why_not_native()
    return f"{operation}_torch", f"smaller, not faster: decoded and multiplied as floats ({reason})"


def _why_not_native() -> str:
    info = policy_kernels.build_info()
    return f"no native kernels: {info.reason}" if not info.built else "the scalar kernel is slower"


# The operators' sides.


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


def _scale_in_torch(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
    scaled_by_row = name == "linear_f8" and args[1].ndim > 0
    if all(dim is None for dim in in_dims[1:]) and not scaled_by_row:
        return _op(name)(args[0].movedim(in_dims[0], 0), *args[1:]), 0
    return _one_by_one(_op(name), info, in_dims, args), 0


def _vmapped_encode_f8(
    info: Any, in_dims: Any, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    x_dim, scale_dim, _ = in_dims
    op = _op("encode_f8")
    if scale_dim is None:
        return op(x.movedim(x_dim, 0), scale, dtype), 0
    xs = [x] * info.batch_size if x_dim is None else x.unbind(x_dim)
    return torch.stack(
        [op(*one, dtype) for one in zip(xs, scale.unbind(scale_dim), strict=True)]
    ), 0


def _vmapped_scale_f8(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    return _one_by_one(_op("scale_f8"), info, in_dims, args), 0


def _vmapped_quantize_rows_f8(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
    codes, scale = _op("quantize_rows_f8")(x.movedim(in_dims[0], 0))
    return (codes, scale.reshape(info.batch_size, -1)), (0, 0)


def _one_by_one(
    op: Callable[..., torch.Tensor], info: Any, in_dims: Any, args: Any
) -> torch.Tensor:
    """Gives an operator's results for each example, one after the other."""
    return torch.stack(
        [
            op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
    )


def _op(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.ops.policy_core_v1, name).default
    return found


_PACKED_OPS = {operation: _op(f"packed_{operation}") for operation in OPERATIONS}

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
    "scale_f8": _scale_in_torch,
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
