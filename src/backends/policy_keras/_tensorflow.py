"""Products where Keras runs on TensorFlow; `_kernels.Products` says what each function gives."""

from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from policy_core._forms import Axes
from policy_core._plan import Plan
from policy_tensorflow import _kernels as kernels
from policy_tensorflow import _native, _plain
from policy_tensorflow._delayed import delayed_scale, output_scale
from policy_tensorflow._float8 import float8_linear
from policy_tensorflow._layers import operation
from policy_tensorflow._ops import TF_DTYPES
from policy_tensorflow._quantize import quantize
from policy_tensorflow._variables import Place
from policy_tensorflow._variables import made_at as tensorflow_made_at
from policy_tensorflow._variables import place_of as tensorflow_place_of

from ._keras import held
from ._kernels import CODES, PACKED

Tensors = dict[str, Any]


def kernel_table(tensor: Any, axes: Axes | None) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    device = kernels.device_type(getattr(tensor, "device", None) or "")
    return device, kernels.kernel_table(device)


def place_of(variable: Any) -> Place:
    return tensorflow_place_of(held(variable))


def made_at(place: Place) -> AbstractContextManager[Any]:
    scope: AbstractContextManager[Any] = tensorflow_made_at(place)
    return scope


def layout(place: Place, shape: tuple[int, ...] | None = None, axes: Axes | None = None) -> None:
    return None


def _kernel(tensor: Any) -> kernels.Kernel:
    return kernels.kernel_here(getattr(tensor, "device", "") or "")


def store(codes: Any, plan: Plan, multiplies: bool) -> tuple[str, Any]:
    # As bits: TensorFlow's operators know few of the code dtypes.
    bits = _plain.as_bits(codes)
    if multiplies and _kernel(bits) == "native":
        return PACKED, _native.pack(bits, str(plan.weight_codes))
    return CODES, bits


def restore(stored: Any, shape: tuple[int, int], dtype: str) -> Any:
    bits = stored if stored.shape.rank == 2 else _native.unpack(stored, shape, dtype)
    return _plain.as_codes(bits, dtype)


def linear(
    plan: Plan,
    shape: tuple[int, int],
    x: Any,
    tensors: Tensors,
    training: bool,
    group: None,
) -> tuple[Any, Tensors]:
    if isinstance(x, tf.SparseTensor):
        x = keras.ops.convert_to_tensor(x, sparse=False)
    if x.shape[-1] is None:
        x = tf.ensure_shape(x, [*([None] * (x.shape.rank - 1)), shape[1]])
    weight, bias, dtype = tensors["weight"], tensors.get("bias"), TF_DTYPES[plan.compute_dtype]
    if plan.trainable:
        return _trainable(plan, x, tensors, training), {}
    x_scale = None
    if plan.delayed and plan.input_codes is not None:
        x_scale = delayed_scale(_state(tensors, "input"), x, plan.input_codes, False)
    scale = tf.broadcast_to(tf.reshape(tensors["weight_scale"], (-1,)), (shape[0],))
    y = kernels.linear(
        operation(plan),
        x,
        weight,
        tf.ensure_shape(scale, (shape[0],)),
        bias,
        codes=str(plan.weight_codes),
        dtype=dtype,
        x_scale=x_scale,
        kernel=_kernel(weight),
    )
    return y, {}


def _trainable(plan: Plan, x: Any, tensors: Tensors, training: bool) -> Any:
    weight = tensors["weight"]
    x_scale = weight_scale = state = None
    moving = training and plan.delayed
    if plan.delayed:
        rows = tf.reduce_prod(tf.shape(x)[:-1])
        pairs = (("input", x, plan.input_codes), ("weight", weight, plan.weight_codes))
        x_scale, weight_scale = (
            delayed_scale(_state(tensors, role), value, str(codes), moving, rows)
            for role, value, codes in pairs
        )
        state = _state(tensors, "output_grad")
    return float8_linear(
        x,
        weight,
        tensors.get("bias"),
        x_scale=x_scale,
        weight_scale=weight_scale,
        gradient_scale=output_scale(state, moving),
        dtype=TF_DTYPES[plan.compute_dtype],
        kernel=_kernel(weight),
    )


def _state(tensors: Tensors, role: str) -> tuple[Any, Any]:
    # TensorFlow's own variables: the backward pass writes to them too.
    return tensors[f"{role}_scale"], tensors[f"{role}_amax_history"]


def rows(plan: Plan, shape: tuple[int, int], ids: Any, stored: Any, scale: Any) -> Any:
    return kernels.rows(
        ids,
        stored,
        tf.reshape(scale, (-1,)),
        shape=shape,
        codes=str(plan.weight_codes),
        dtype=TF_DTYPES[plan.compute_dtype],
        kernel=_kernel(stored),
    )


def frozen_weight(plan: Plan, tensors: Tensors) -> tuple[Any, Any]:
    assert plan.weight_codes is not None
    weight = tensors["weight"]
    if not plan.delayed:
        return quantize(weight, plan.weight_codes, plan.scale_axes)
    scale = delayed_scale(_state(tensors, "weight"), weight, plan.weight_codes, False)
    return _plain.encode(weight, scale, plan.weight_codes), tf.reshape(scale, (1, 1))


def gradient_state(layer: Any, name: str, value: Any, layout: None) -> None:
    return None
