"""How a wrapped layer computes: casts, products on codes, and delayed-scaling state."""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from policy_core import _scaling
from policy_core._plan import Plan

from . import _kernels
from ._casting import convert_input
from ._ops import OPS, Array
from ._quantize import dequantize, encode, quantize

if TYPE_CHECKING:
    from ._models import Embedding, Layer


@dataclass(frozen=True, eq=False)
class Operands:
    """What a linear layer really multiplied, for its gradient; dequantized when it is asked for.

    Attributes:
        x_values: Floats or codes of shape (m, k).
        x_scale: The scales of codes, to broadcast; None for floats.
        codes: The weight's codes, of shape (n, k), as an array or packed.
        scale: Their scales, to broadcast.
    """

    x_values: Array
    x_scale: Array | None
    codes: _kernels.Weight
    scale: Array

    @functools.cached_property
    def x(self) -> Array:
        """float32 of shape (m, k)."""
        if self.x_scale is None:
            return self.x_values.astype(np.float32, copy=False)
        return dequantize(self.x_values, self.x_scale)

    @functools.cached_property
    def weight(self) -> Array:
        """float32 of shape (n, k)."""
        return dequantize(_kernels.plain(self.codes), self.scale)


def call(layer: "Layer", x: Any, training: bool) -> Array:
    """Gives a leaf layer's output under its policy."""
    x = np.asarray(x)
    if layer.wrapping is None:
        return layer.compute(x, layer.tensors)
    plan = layer.wrapping.plan
    if not plan.autocast:
        return layer.compute(x, layer.tensors)
    x = convert_input(x, plan.compute_dtype)
    if plan.quantized and layer.kind == "embedding":
        return _embedding(layer, x, plan)  # type: ignore[arg-type]  # its kind says what it is
    if plan.quantized:
        y, _, state = linear(x, layer.tensors, plan, training)
        layer.tensors.update(state)
        return layer.finish(y)
    # Norms compute in the accumulator's dtype: the square of a float16 overflows at 256.
    inside = plan.accumulator if layer.kind == "norm" else plan.compute_dtype
    tensors = {name: convert_input(t, inside) for name, t in layer.tensors.items()}
    with np.errstate(over="ignore", invalid="ignore"):
        y = layer.compute(convert_input(x, inside), tensors)
    result: Array = convert_input(y, plan.compute_dtype)
    return result


def linear(
    x: Array, tensors: dict[str, Array], plan: Plan, training: bool = False
) -> tuple[Array, Operands, dict[str, Array]]:
    """Gives a quantized linear layer's product, as docs/numerics.md says.

    Args:
        x: Floats of shape (..., k).
        tensors: The layer's stored tensors, those of `plan.storage`.
        plan: A quantized plan.
        training: Whether delayed-scaling state moves.

    Returns:
        Floats of shape (..., n) in the plan's compute dtype; what was multiplied; and the state
        tensors that change, by name (none outside training and for inputs without rows).

    Raises:
        ValueError: The last axis of `x` has another size than the weight's.
    """
    weight = tensors["weight"]
    n, k = _kernels.shape_of(weight)
    _kernels.check_last_axis(x, k)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    bias = _as_kernel_float(tensors.get("bias"))
    result_dtype = plan.compute_dtype if plan.compute_dtype in _kernels.KERNEL_FLOATS else "float32"
    state: dict[str, Array] = {}
    x_column = None
    if plan.input_codes == "float8_e4m3fn":
        rows = rows.astype(np.float32, copy=False)
        moving = training and plan.trainable and len(rows) > 0
        x_codes, x_scale = _input_codes(rows, tensors, plan, moving, state)
        codes, scale = _weight_codes(tensors, plan, moving, state)
        y = _kernels.linear_f8(x_codes, x_scale, codes, scale, bias, result_dtype)
        x_column = x_scale if x_scale.ndim == 0 else x_scale[:, None]
        rows = x_codes
    else:
        codes, scale = weight, tensors["weight_scale"].reshape(-1)
        operation = {
            ("int8", "int8"): _kernels.linear_s8,
            ("int8", None): _kernels.linear_s8w,
            ("float8_e4m3fn", None): _kernels.linear_f8w,
        }[str(plan.weight_codes), plan.input_codes]
        y = operation(_as_kernel_float(rows), codes, scale, bias, result_dtype)
    column = scale if scale.ndim == 0 else scale[:, None]
    operands = Operands(rows, x_column, codes, column)
    shaped = y.reshape(*x.shape[:-1], n)
    return convert_input(shaped, plan.compute_dtype), operands, state


def _as_kernel_float(x: Any) -> Any:
    """Gives a float array as it is if the kernels read its dtype, else in float32; None stays."""
    if x is None or (x.dtype.name in _kernels.KERNEL_FLOATS and x.dtype.isnative):
        return x
    return x.astype(np.float32)


def linear_gradient(
    dy: Array, operands: Operands, tensors: dict[str, Array], plan: Plan
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Gives the gradients of `linear`, straight through all rounding.

    Args:
        dy: The output gradient, floats of shape (m, n).
        operands: What `linear` multiplied.
        tensors: The layer's stored tensors, after `linear`.
        plan: The plan that `linear` had.

    Returns:
        The input gradient, float32 of shape (m, k); the gradients of trainable tensors by name,
        in the variable dtype (codes have none); and the state tensors that change, by name.
    """
    dy = dy.astype(np.float32, copy=False)
    gradients: dict[str, Array] = {}
    state: dict[str, Array] = {}
    if "bias" in tensors:
        gradients["bias"] = convert_input(dy.sum(0), plan.variable_dtype)
    multiplied = dy
    if plan.gradient_codes is not None and len(dy) > 0:
        if plan.delayed:
            scale = _delayed_scale(dy, tensors, "output_grad", plan.gradient_codes, True, state)
            multiplied = dequantize(encode(dy, scale, plan.gradient_codes), scale)
        else:
            multiplied = dequantize(*quantize(dy, plan.gradient_codes, (0, 1)))
    if plan.trainable:
        weight = (multiplied.T.astype(np.float64) @ operands.x).astype(np.float32)
        gradients["weight"] = convert_input(weight, plan.variable_dtype)
    dx = (multiplied.astype(np.float64) @ operands.weight).astype(np.float32)
    return dx, gradients, state


def frozen_weight(tensors: dict[str, Array], plan: Plan) -> tuple[Array, Array]:
    """Gives the weight's codes and scales as a trainable layer uses them outside training."""
    codes, scale = _weight_codes(tensors, plan, False, {})
    shape = [1 if i in plan.scale_axes else n for i, n in enumerate(codes.shape)]
    return codes, np.asarray(scale, np.float32).reshape(shape)


def float_tensor(layer: "Layer", name: str) -> Array:
    """Gives a layer's tensor as a float, dequantized to its plain dtype if need be."""
    tensor = layer.tensors[name]
    plan = None if layer.wrapping is None else layer.wrapping.plan
    if name == "weight" and plan is not None and plan.quantized and not plan.trainable:
        dtype = next(spec.dtype for spec in layer.plain_specs if spec.name == name)
        return dequantize(_kernels.plain(tensor), layer.tensors["weight_scale"], dtype)
    return tensor


def _embedding(layer: "Embedding", ids: Array, plan: Plan) -> Array:
    codes, scale = layer.tensors["weight"], layer.tensors["weight_scale"]
    return _kernels.rows(codes, scale, layer.checked_ids(ids), plan.compute_dtype)


def _input_codes(
    rows: Array, tensors: dict[str, Array], plan: Plan, training: bool, state: dict[str, Array]
) -> tuple[Array, Array]:
    assert plan.input_codes is not None
    if plan.delayed:
        scale = _delayed_scale(rows, tensors, "input", plan.input_codes, training, state)
        return encode(rows, scale, plan.input_codes), scale
    codes, column = quantize(rows, plan.input_codes, (1,))
    return codes, column.reshape(-1)


def _weight_codes(
    tensors: dict[str, Array], plan: Plan, training: bool, state: dict[str, Array]
) -> tuple[Array, Array]:
    assert plan.weight_codes is not None
    weight = tensors["weight"]
    if not plan.trainable:
        codes, column = weight, tensors["weight_scale"]
    elif plan.delayed:
        scale = _delayed_scale(weight, tensors, "weight", plan.weight_codes, training, state)
        return encode(weight, scale, plan.weight_codes), scale
    else:
        codes, column = quantize(weight, plan.weight_codes, plan.scale_axes)
    return codes, column.reshape(() if plan.delayed else (-1,))


def _delayed_scale(
    x: Array,
    tensors: dict[str, Array],
    role: str,
    dtype: str,
    training: bool,
    changes: dict[str, Array],
) -> Array:
    """Gives the scale of one tensor role, and in training adds its next state to `changes`."""
    names = (f"{role}_scale", f"{role}_amax_history")
    state = _scaling.AmaxState(*(tensors[name] for name in names))
    largest = _scaling.amax(OPS, x, (0, 1)).reshape(())
    if not training:
        return np.asarray(_scaling.inference_scale(OPS, state, largest, dtype))
    scale, after = _scaling.training_scale(OPS, state, largest, dtype)
    changes.update(zip(names, map(np.asarray, after), strict=True))
    return np.asarray(scale)
