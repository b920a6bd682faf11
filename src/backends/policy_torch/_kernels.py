"""How torch reaches a product with quantized weights on each device; `_operators.py` has the ways.

`linear_s8`, `linear_s8w`, `linear_f8` and `linear_f8w` take plain codes, on any device;
`packed_linear` takes what a layer on a CPU keeps: codes in the kernels' layout.
"""

import torch

import policy_kernels
from policy_core import _scaling

from . import _emulation, _native, _operators, _quantize, _scaled_mm, _stable
from ._ops import TORCH_DTYPES, ops_for
from ._stable import OPERATIONS

# A plain value: what torch.compile traces must not ask a cached function.
_NATIVE_FLOAT8 = _native.outruns_torch("linear_f8")

_PACKED_OPS = {one: _operators.op(f"packed_{one}") for one in OPERATIONS}


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
    return _operators.scale_in_torch(x, TORCH_DTYPES[dtype])


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
    reason = _why_not_native() if device == "cpu" else _why_no_codes(operation, device)
    return f"{operation}_torch", f"smaller, not faster: decoded and multiplied as floats ({reason})"


def _why_no_codes(operation: str, device: str) -> str:
    if operation == "linear_s8":
        return _emulation.int_mm_failure(device)
    if operation == "linear_f8":
        return _scaled_mm.failure(device)
    return f"no routine multiplies codes by floats on {device!r}"


def _why_not_native() -> str:
    info = policy_kernels.build_info()
    return f"no native kernels: {info.reason}" if not info.built else "the scalar kernel is slower"
