"""How a wrapped module computes: one mixin for each way, chosen by its plan."""

import abc
from typing import Any

import tensorflow as tf

from policy_core._plan import Plan

from . import _float8, _kernels
from ._adapters import LayerAdapter
from ._casting import cast_nest, cast_tensor
from ._classes import KeepsCodes, Wrapped, codes_of, compute_dtype, reading
from ._delayed import State, delayed_scale, is_training, output_scale
from ._ops import TF_DTYPES, Tensor


def mixin_for(plan: Plan, adapter: LayerAdapter) -> type[Wrapped]:
    """Gives the mixin by which a module follows its plan."""
    if not plan.autocast:
        return AsItIs
    if not plan.quantized:
        return FloatLayer
    if adapter.kind == "embedding":
        return CodesEmbedding
    return TrainableLinear if plan.trainable else CodesLinear


def operation(plan: Plan) -> str:
    """Gives the product that a quantized plan means."""
    if plan.weight_codes == "int8":
        return "linear_s8" if plan.input_codes else "linear_s8w"
    return "linear_f8" if plan.input_codes else "linear_f8w"


class AsItIs(Wrapped):
    """A module under a policy that is no float: nothing is cast."""


class FloatLayer(Wrapped):
    """A module that reads its float variables in the compute dtype and keeps them in their own.

    A norm computes in float32 inside.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._policy_wrapping.plan
        outside = TF_DTYPES[plan.compute_dtype]
        norm = self._policy_adapter.kind == "norm"
        inside = TF_DTYPES[plan.accumulator] if norm else outside
        args, kwargs = cast_nest(args, inside), cast_nest(kwargs, inside)
        base: Any = super()
        call = self._policy_call or base.__call__
        with reading(self, inside):
            y = call(*args, **kwargs)
        return cast_nest(y, outside)


class CodesEmbedding(KeepsCodes):
    """An embedding that keeps only codes."""

    def __call__(self, ids: Any) -> Any:
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self(ids.flat_values))
        ids = tf.convert_to_tensor(ids)
        if not ids.dtype.is_integer:
            raise TypeError(f"Expected integer ids. Received dtype {ids.dtype.name}.")
        stored = codes_of(self)
        return _kernels.rows(
            ids,
            tf.convert_to_tensor(self.weight_codes),
            tf.convert_to_tensor(self.weight_scale),
            shape=stored.shape,
            codes=str(stored.codes),
            dtype=compute_dtype(self),
            kernel=_kernels.kernel_here(self.weight_codes.device),
        )


class _QuantizedLinear:
    """What the quantized linear modules share: a product, and the adapter's way to use it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._policy_adapter.forward  # type: ignore[attr-defined]
        if forward is None:
            return self._linear(*args, **kwargs)
        return forward(self, self._linear, *args, **kwargs)

    @abc.abstractmethod
    def _linear(self, x: Any, bias: Any = None) -> Tensor:
        """Gives the product, from what the form keeps of the weight."""


class CodesLinear(_QuantizedLinear, KeepsCodes):
    """A linear module that keeps only codes."""

    def _linear(self, x: Any, bias: Any = None) -> Tensor:
        plan = self._policy_wrapping.plan
        stored = codes_of(self)
        x = _input(self, x, stored.shape[1])
        x_scale = None
        if plan.delayed and plan.input_codes is not None:
            x_scale = delayed_scale(state_of(self, "input"), x, plan.input_codes, False)
        return _kernels.linear(
            operation(plan),
            x,
            tf.convert_to_tensor(self.weight_codes),
            tf.convert_to_tensor(self.weight_scale),
            _bias_of(self, bias),
            codes=str(stored.codes),
            dtype=compute_dtype(self),
            x_scale=x_scale,
            k=stored.shape[1],
            kernel=_kernels.kernel_here(self.weight_codes.device),
        )


class TrainableLinear(_QuantizedLinear, Wrapped):
    """A linear module that computes in float8 and trains its float weight."""

    def _linear(self, x: Any, bias: Any = None) -> Tensor:
        plan = self._policy_wrapping.plan
        adapter = self._policy_adapter
        variable = getattr(self, adapter.weight)
        weight = tf.transpose(variable) if adapter.transposed else tf.convert_to_tensor(variable)
        x = _input(self, x, weight.shape[1])
        x_scale = weight_scale = state = None
        moving = False
        if plan.delayed:
            moving = is_training()
            rows = tf.reduce_prod(tf.shape(x)[:-1]) if moving else None
            x_state, weight_state = state_of(self, "input"), state_of(self, "weight")
            x_scale = delayed_scale(x_state, x, str(plan.input_codes), moving, rows)
            weight_scale = delayed_scale(weight_state, weight, str(plan.weight_codes), moving, rows)
            state = state_of(self, "output_grad")
        return _float8.float8_linear(
            x,
            weight,
            _bias_of(self, bias),
            x_scale=x_scale,
            weight_scale=weight_scale,
            gradient_scale=output_scale(state, moving),
            dtype=compute_dtype(self),
            kernel=_kernels.kernel_here(variable.device),
        )


def state_of(module: Any, role: str) -> State:
    """Gives the variables of a role's delayed-scaling state."""
    return getattr(module, f"{role}_scale"), getattr(module, f"{role}_amax_history")


def _bias_of(module: Any, bias: Any) -> Tensor | None:
    if bias is None:
        bias = getattr(module, module._policy_adapter.bias, None)
    return None if bias is None else tf.convert_to_tensor(bias)


def _input(module: Any, x: Any, columns: int) -> Tensor:
    return checked_input(cast_tensor(tf.convert_to_tensor(x), compute_dtype(module)), columns)


def checked_input(x: Tensor, columns: int) -> Tensor:
    """Gives an input itself; ValueError unless its shape is, or may be, (..., columns)."""
    rank = x.shape.rank
    if rank is None:
        return x
    if rank == 0 or x.shape[-1] not in (None, columns):
        raise ValueError(
            f"Expected an input of shape (..., {columns}). Received shape {tuple(x.shape)}."
        )
    return x if x.shape[-1] else tf.ensure_shape(x, [*x.shape[:-1], columns])
