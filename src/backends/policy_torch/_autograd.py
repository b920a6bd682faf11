"""The products of quantized layers with their gradients, straight through all rounding."""

import math
from typing import Any

import torch

from policy_core._plan import Plan

from . import _kernels
from ._emulation import dequantized_rows
from ._float8 import GradientScale
from ._ops import TORCH_DTYPES
from ._quantize import dequantize


def codes_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
) -> torch.Tensor:
    """Gives the product of a layer that keeps only codes.

    Args:
        x: Floats of shape (m, k).
        x_scale: The input's scale under delayed scaling, float32 of shape (); else None.
        codes: int8 or float8 of shape (n, k).
        scale: float32 of shape (n,), or () under delayed scaling.
        bias: Floats of shape (n,), or None.
        plan: The layer's plan.
    """
    operation = _operation(plan)
    dtype = TORCH_DTYPES[plan.compute_dtype]
    if _needs_gradient(x, bias):
        y: torch.Tensor = _CodesLinear.apply(x, x_scale, codes, scale, bias, operation, dtype)
        return y
    return _forward(x, x_scale, codes, scale, bias, operation, dtype)


def _operation(plan: Plan) -> str:
    if plan.weight_codes == "int8":
        return "linear_s8" if plan.input_codes else "linear_s8w"
    return "linear_f8" if plan.input_codes else "linear_f8w"


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _forward(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    operation: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    if operation == "linear_s8":
        return _kernels.linear_s8(x, codes, scale, bias, dtype)
    if operation == "linear_s8w":
        return _kernels.linear_s8w(x, codes, scale, bias, dtype)
    if operation == "linear_f8w":
        return _kernels.linear_f8w(x, codes, scale, bias, dtype)
    x_codes, x_scale = input_codes(x, x_scale)
    return _kernels.linear_f8(x_codes, x_scale, codes, scale, bias, dtype)


def input_codes(x: torch.Tensor, x_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives a matrix in float8_e4m3fn, under a given scale or one per row, and its scales."""
    if x_scale is not None:
        return _kernels.encode_f8(x, x_scale, "float8_e4m3fn"), x_scale
    return _kernels.quantize_rows_f8(x)


def packed_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    packed: torch.Tensor,
    shape: tuple[int, int],
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
) -> torch.Tensor:
    """Gives the product of a layer that keeps only packed codes, of shape (n, k).

    Arguments and result are those of `codes_linear`, but `x` may have any leading axes.
    """
    operation = _operation(plan)
    dtype, codes_dtype = TORCH_DTYPES[plan.compute_dtype], TORCH_DTYPES[str(plan.weight_codes)]
    if _needs_gradient(x, bias):
        arguments = (x, x_scale, packed, scale, bias, shape, operation, codes_dtype, dtype)
        y: torch.Tensor = _PackedLinear.apply(*arguments)
        return y
    return _kernels.packed_linear(
        operation, x, x_scale, packed, shape, codes_dtype, scale, bias, dtype
    )


class _PackedLinear(torch.autograd.Function):
    """`packed_linear` with the input's and the bias's gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        packed: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        operation: str,
        codes_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return _kernels.packed_linear(
            operation, x, x_scale, packed, shape, codes_dtype, scale, bias, dtype
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, packed, scale, bias, shape, _, codes_dtype, _ = inputs
        ctx.save_for_backward(packed, scale)
        ctx.codes = (*shape, codes_dtype)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        packed, scale = ctx.saved_tensors
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            weight = dequantize(_kernels.unpack(packed, *ctx.codes), scale.reshape(-1, 1))
            dx = (dy.float() @ weight).to(ctx.x_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
            rows = dy.float().reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
            dbias = rows.sum(0).to(ctx.bias_dtype)
        return dx, None, None, None, dbias, None, None, None, None


class _CodesLinear(torch.autograd.Function):
    """`codes_linear` with the input's and the bias's gradient; codes are not trainable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, codes, scale, bias, _, _ = inputs
        ctx.save_for_backward(codes, scale)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        codes, scale = ctx.saved_tensors
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = (dy.float() @ dequantized_rows(codes, scale)).to(ctx.x_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
            dbias = dy.float().sum(0).to(ctx.bias_dtype)
        return dx, None, None, None, dbias, None, None


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    gradient_scale: GradientScale,
    plan: Plan,
) -> torch.Tensor:
    """Gives the product of a float8 layer that keeps its float weight.

    Args:
        x: Floats of shape (m, k).
        weight: Floats of shape (n, k).
        bias: Floats of shape (n,), or None.
        x_scale: float32 of shape (), or None for a scale per row.
        weight_scale: float32 of shape (), or None for a scale per row.
        gradient_scale: Gives the output gradient's scale in backward.
        plan: The layer's plan.
    """
    dtype = TORCH_DTYPES[plan.compute_dtype]
    x_codes, x_scale = input_codes(x.detach(), x_scale)
    codes, scale = input_codes(weight.detach(), weight_scale)
    if not _needs_gradient(x, weight, bias):
        return _kernels.linear_f8(x_codes, x_scale, codes, scale, bias, dtype)
    y: torch.Tensor = _Float8Linear.apply(
        x, weight, bias, x_codes, x_scale, codes, scale, gradient_scale, dtype
    )
    return y


class _Float8Linear(torch.autograd.Function):
    """`float8_linear` with all gradients: e4m3fn forward, e5m2 backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x_codes: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        gradient_scale: GradientScale,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return _kernels.linear_f8(x_codes, x_scale, codes, scale, bias, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, x_codes, x_scale, codes, scale, gradient_scale, dtype = inputs
        ctx.save_for_backward(x_codes, x_scale, codes, scale)
        # Not saved tensors: a second call's backward moves its buffers between save and use.
        ctx.gradient_scale = gradient_scale
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype, dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        x_codes, x_scale, codes, scale = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype, dtype = ctx.dtypes
        dx = dweight = dbias = None
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias = dy.sum(0, dtype=torch.float32).to(bias_dtype)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            g_scale = ctx.gradient_scale(dy)
            g = _kernels.encode_f8(dy, g_scale, "float8_e5m2")
            if ctx.needs_input_grad[0]:
                dx = _product(g, g_scale, codes.T, scale, dtype).to(x_dtype)
            if ctx.needs_input_grad[1]:
                dweight = _product(g.T, g_scale, x_codes.T, x_scale, dtype).to(weight_dtype)
        if torch.is_grad_enabled() and dy.requires_grad and not torch.compiler.is_compiling():
            dx, dweight = (t if t is None else _Once.apply(t, dy) for t in (dx, dweight))
        return dx, dweight, dbias, None, None, None, None, None, None


class _Once(torch.autograd.Function):
    """A gradient that has none itself: torch would take the codes that made it for constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "A float8 layer that trains has first derivatives only. For second ones give it a float "
            "policy, or pc.freeze it."
        )


def _product(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gives `(left * left_scale) @ (right * right_scale).T` for codes.

    Args:
        left: float8 of shape (m, k).
        left_scale: float32 of shape ().
        right: float8 of shape (n, k).
        right_scale: float32 of shape (), or (k,): then the axis that is summed over has scales,
            which no product of codes can take out of its sum, and the left side is scaled first.
        dtype: The dtype of the result.
    """
    if right_scale.ndim == 0:
        return _kernels.linear_f8(left, left_scale, right, right_scale, None, dtype)
    inside = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scaled = (left.float() * (left_scale * right_scale)).to(inside)
    return _kernels.linear_f8w(scaled, right, torch.ones_like(left_scale), None, dtype)
