"""How torch reaches a product with quantized weights on each device, as operators of torch.

The operators of `policy_core_v1` are opaque to torch.compile and torch.export, and take any strides.
`linear_s8`, `linear_s8w`, `linear_f8` and `linear_f8w` take plain codes: on a CPU they run the native
kernels where these are faster than torch's own routines, on CUDA torch's `_int_mm` and `_scaled_mm`,
elsewhere plain torch. `linear_packed` takes what a layer on a CPU keeps: codes in the kernels' layout.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

import policy_kernels
from policy_core import _scaling

from . import _emulation, _native, _quantize, _scaled_mm
from ._ops import TORCH_DTYPES, ops_for

LIBRARY = torch.library.Library("policy_core_v1", "DEF")
"""Kept for the life of the process: the operators go with it."""

OPERATIONS = ("linear_s8", "linear_s8w", "linear_f8", "linear_f8w")

# A plain value: what torch.compile traces must not ask a cached function.
_NATIVE_FLOAT8 = _native.outruns_torch("linear_f8")

_WEIGHT = "Tensor codes, Tensor scale, Tensor? bias, ScalarType dtype"
for _name in OPERATIONS:
    _x = "Tensor x_codes, Tensor x_scale" if _name == "linear_f8" else "Tensor x"
    LIBRARY.define(f"{_name}({_x}, {_WEIGHT}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    "linear_packed(str operation, Tensor x, Tensor? x_scale, Tensor packed, SymInt n, "
    "ScalarType codes, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "unpack(Tensor packed, SymInt n, SymInt k, ScalarType codes) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "rows_packed(Tensor ids, Tensor packed, SymInt n, SymInt k, ScalarType codes, Tensor scale) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "encode_f8(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "quantize_rows_f8(Tensor x) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)


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


def linear_packed(
    operation: str,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    packed: torch.Tensor,
    n: int,
    codes: torch.dtype,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives the product of an operation for a packed weight of shape (n, k), on a CPU.

    Args:
        operation: One of `OPERATIONS`; its function says what the other arguments are.
        x: Floats, or codes for `"linear_f8"`.
        x_scale: The scales of codes, else None.
        packed: What `_native.pack` gave.
        n: The number of output channels.
        codes: The dtype of what was packed.
        scale: The weight's scales.
        bias: The bias, or None.
        dtype: The dtype of the result.
    """
    y: torch.Tensor = torch.ops.policy_core_v1.linear_packed.default(
        operation, x, x_scale, packed, n, codes, scale, bias, dtype
    )
    return y


def unpack(packed: torch.Tensor, n: int, k: int, codes: torch.dtype) -> torch.Tensor:
    """Gives the codes of a packed weight of shape (n, k)."""
    plain: torch.Tensor = torch.ops.policy_core_v1.unpack.default(packed, n, k, codes)
    return plain


def rows_packed(
    ids: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    k: int,
    codes: torch.dtype,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Gives `codes[ids] * scale[ids]` in float32 for a packed table of shape (n, k) and 1-D ids."""
    y: torch.Tensor = torch.ops.policy_core_v1.rows_packed.default(ids, packed, n, k, codes, scale)
    return y


def encode_f8(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gives the float8 codes of a tensor under one scale; what is too large saturates."""
    if _NATIVE_FLOAT8 and x.device.type == "cpu":
        codes: torch.Tensor = torch.ops.policy_core_v1.encode_f8.default(
            x, scale, TORCH_DTYPES[dtype]
        )
        return codes
    return _quantize.encode(x, scale, dtype)


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
        return policy_kernels.kernel_name(operation), ""
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


def _on_cpu(operation: str, *args: Any) -> torch.Tensor:
    if not _native.outruns_torch(operation):
        return _PLAIN[operation](*args)
    *rows, codes, scale, bias, dtype = args
    x, x_scale = rows if operation == "linear_f8" else (*rows, None)
    packed = _native.pack(codes)
    n, kind = codes.shape[0], codes.dtype
    return _native.linear(operation, x, x_scale, packed, n, kind, scale, bias, dtype)


def _on_cuda(operation: str, *args: Any) -> torch.Tensor:
    if operation == "linear_f8" and _scaled_mm.supported("cuda"):
        return _scaled_mm.linear_f8(*args)
    return _PLAIN[operation](*args)


def _fake(operation: str, *args: Any) -> torch.Tensor:
    *tensors, codes, _, _, dtype = args
    return tensors[0].new_empty((tensors[0].shape[0], codes.shape[0]), dtype=dtype)


def _vmapped(operation: str, info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    rows_only = all(dim is None for dim in in_dims[1:])
    if rows_only and operation != "linear_f8":
        # A batch of rows is more rows.
        x = args[0].movedim(in_dims[0], 0)
        y = _op(operation)(x.flatten(0, 1), *args[1:])
        return y.unflatten(0, x.shape[:2]), 0
    return _one_by_one(_op(operation), info, in_dims, args), 0


def _fake_linear_packed(
    operation: str, x: torch.Tensor, x_scale: Any, packed: torch.Tensor, n: int, *args: Any
) -> torch.Tensor:
    return x.new_empty((x.shape[0], n), dtype=args[-1])


def _fake_unpack(packed: torch.Tensor, n: int, k: int, codes: torch.dtype) -> torch.Tensor:
    return packed.new_empty((n, k), dtype=codes)


def _fake_rows_packed(
    ids: torch.Tensor, packed: torch.Tensor, n: int, k: int, codes: Any, scale: torch.Tensor
) -> torch.Tensor:
    return scale.new_empty((ids.shape[0], k), dtype=torch.float32)


def _vmapped_linear_packed(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    operation, x, x_scale, *rest = args
    op = _op("linear_packed")
    if all(dim is None for dim in in_dims[2:]) and (x_scale is None or x_scale.ndim == 0):
        x = x.movedim(in_dims[1], 0)
        y = op(operation, x.flatten(0, 1), x_scale, *rest)
        return y.unflatten(0, x.shape[:2]), 0
    return _one_by_one(op, info, in_dims, args), 0


def _vmapped_rows_packed(info: Any, in_dims: Any, *args: Any) -> tuple[torch.Tensor, int]:
    ids, *rest = args
    op = _op("rows_packed")
    if all(dim is None for dim in in_dims[1:]):
        ids = ids.movedim(in_dims[0], 0)
        return op(ids.flatten(), *rest).unflatten(0, ids.shape), 0
    return _one_by_one(op, info, in_dims, args), 0


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


def _fake_encode_f8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _fake_quantize_rows_f8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(x.shape[:1], dtype=torch.float32)


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


def _vmapped_quantize_rows_f8(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
    x = x.movedim(in_dims[0], 0)
    codes, scale = torch.ops.policy_core_v1.quantize_rows_f8.default(x.flatten(0, 1))
    return (codes.unflatten(0, x.shape[:2]), scale.unflatten(0, x.shape[:2])), (0, 0)


def _op(operation: str) -> Callable[..., torch.Tensor]:
    found: Callable[..., torch.Tensor] = getattr(torch.ops.policy_core_v1, operation).default
    return found


_PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "linear_s8": _emulation.linear_s8,
    "linear_s8w": _emulation.linear_w,
    "linear_f8": _emulation.linear_f8,
    "linear_f8w": _emulation.linear_w,
}


def _register() -> None:
    for name in OPERATIONS:
        LIBRARY.impl(name, functools.partial(_on_cpu, name), "CPU")
        LIBRARY.impl(name, functools.partial(_on_cuda, name), "CUDA")
        LIBRARY.impl(name, _PLAIN[name], "CompositeExplicitAutograd")
        full = f"policy_core_v1::{name}"
        torch.library.register_fake(full, functools.partial(_fake, name), lib=LIBRARY)
        torch.library.register_vmap(full, functools.partial(_vmapped, name), lib=LIBRARY)
    LIBRARY.impl("linear_packed", _native.linear, "CPU")
    LIBRARY.impl("unpack", _native.unpack, "CPU")
    LIBRARY.impl("rows_packed", _native.rows, "CPU")
    torch.library.register_fake("policy_core_v1::unpack", _fake_unpack, lib=LIBRARY)
    LIBRARY.impl("encode_f8", _native.encode_f8, "CPU")
    LIBRARY.impl("quantize_rows_f8", _native.quantize_rows_f8, "CPU")
    for name, fake, vmapped in (
        ("linear_packed", _fake_linear_packed, _vmapped_linear_packed),
        ("rows_packed", _fake_rows_packed, _vmapped_rows_packed),
        ("encode_f8", _fake_encode_f8, _vmapped_encode_f8),
        ("quantize_rows_f8", _fake_quantize_rows_f8, _vmapped_quantize_rows_f8),
    ):
        torch.library.register_fake(f"policy_core_v1::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(f"policy_core_v1::{name}", vmapped, lib=LIBRARY)


_register()
