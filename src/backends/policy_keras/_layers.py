"""How a wrapped layer computes, and what it writes to files: one mixin for each way."""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
from keras import ops

from policy_core._dtypes import is_castable_float, standardize_dtype
from policy_core._plan import Plan

from ._adapters import LayerAdapter
from ._classes import VERSION, Wrapped
from ._keras import held, raw, reading_in, training_argument
from ._kernels import FRAMEWORK, PRODUCTS
from ._stored import GRADIENT_STATE, SCALE, codes_variable, quantized_tensors, state_specs


def mixin_for(plan: Plan, adapter: LayerAdapter) -> type[Wrapped]:
    """Gives the mixin by which a layer follows its plan."""
    if not plan.quantized:
        return NormLayer if plan.autocast and adapter.kind == "norm" else FloatLayer
    if adapter.kind == "embedding":
        return CodesEmbedding
    return TrainableLinear if plan.trainable else CodesLinear


class FloatLayer(Wrapped):
    """A layer under a float policy, or one that is no float: Keras itself casts."""


class NormLayer(Wrapped):
    """A normalization that computes in float32 inside, and casts its output."""

    @property
    def input_dtype(self) -> str:
        """The dtype in which inputs arrive: not first rounded to what they leave in."""
        return self.policy_plan.accumulator

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.policy_plan
        with reading_in(plan.accumulator):
            y = self._policy_base.call(self, *args, **kwargs)  # type: ignore[attr-defined]
        return ops.cast(y, plan.compute_dtype)


class Quantized(Wrapped):
    """What quantized layers share: variables with names in files, and what they refuse."""

    def save_own_variables(self, store: Any) -> None:
        """Writes plain codes, scales and state under the names that `policy_core.save` uses."""
        store["version"] = np.asarray(VERSION, np.int32)
        for name, stored in quantized_tensors(self).items():
            array = FRAMEWORK.to_numpy(stored.read())
            # HDF5 has no float8: the plan knows what the bits mean.
            store[name] = array.view(np.uint8) if "float8" in array.dtype.name else array

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, or the variables of the plain layer.

        Raises:
            ValueError: A name, shape or version does not fit.
        """
        from ._saving import load_variables  # it makes layers of these classes

        load_variables(self, store)

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: LoRA's matrices are added to a float kernel."""
        raise NotImplementedError(
            f"{type(self).__name__} computes with codes, and LoRA adds to a float kernel. "
            "policy_core.unwrap it first."
        )

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape (out, in) of the weight."""
        storage = self.policy_plan.storage
        n, k = next(spec.shape for spec in storage if spec.name == "weight")
        return n, k


class KeepsCodes(Quantized):
    """A layer of whose weight only codes are left."""

    def float_weight(self) -> Any:
        """Gives the weight as Keras has it, in the variable dtype: made anew."""
        plan, stored = self.policy_plan, quantized_tensors(self)
        weight = FRAMEWORK.dequantize(
            stored["weight"].read(), stored[SCALE].read(), plan.variable_dtype
        )
        form = self._policy_form
        if form is None:
            return weight
        return form.axes.from_file(keras.ops, weight, vars(self)["_policy_kernel_shape"])

    def rows(self, ids: Any) -> Any:
        """Gives rows of the weight in the compute dtype."""
        stored, scale = raw(codes_variable(self)), raw(getattr(self, SCALE))
        shape, ids = self.weight_shape, _as_ids(ids)
        # As keras.ops.take has it: from the end.
        ids = ops.where(ids < 0, ids + shape[0], ids)
        return PRODUCTS.rows(self.policy_plan, shape, ids, stored, scale)


class CodesEmbedding(KeepsCodes):
    """An embedding that keeps only codes."""

    def compute(self, inputs: Any) -> Any:
        return self.rows(inputs)


class QuantizedLinear(Quantized):
    """What quantized linear layers share: a product, and the adapter's way to use it."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        assert self._policy_adapter.call is not None
        return self._policy_adapter.call(self, self.product, *args, **kwargs)

    def product(self, x: Any, dtype: str | None = None) -> Any:
        """Gives the layer's product, bias included, in a dtype; the compute dtype for None."""
        plan, form = self.policy_plan, self._policy_form
        assert form is not None
        if dtype is not None and standardize_dtype(dtype) != plan.compute_dtype:
            plan = _in_dtype(plan, standardize_dtype(dtype))
        own = keras.backend.standardize_dtype(x.dtype)
        if own != plan.compute_dtype and is_castable_float(own):
            x = ops.cast(x, plan.compute_dtype)
        rows, finish = form.arrange(x)
        tensors = self.operands(plan)
        bias = getattr(self, "bias", None)
        if bias is not None and form.flat_bias:
            tensors["bias"] = ops.reshape(raw(bias), (-1,))
        training = plan.trainable and training_argument()
        group = vars(self).get("_policy_group")
        y, state = PRODUCTS.linear(plan, self.weight_shape, rows, tensors, training, group)
        if training and state:
            self.keep(state)
        y = finish(y)
        if bias is not None and not form.flat_bias:
            y = ops.add(y, ops.cast(raw(bias), plan.compute_dtype))
        return y

    def operands(self, plan: Plan) -> dict[str, Any]:
        """Gives the tensors that the product takes, but the bias."""
        raise TypeError("A mixin must say what it multiplies.")

    def keep(self, state: dict[str, Any]) -> None:
        """Writes the state after a training call."""


class CodesLinear(QuantizedLinear, KeepsCodes):
    """A linear layer that keeps only codes."""

    def operands(self, plan: Plan) -> dict[str, Any]:
        tensors = {"weight": raw(codes_variable(self)), SCALE: raw(getattr(self, SCALE))}
        for spec in state_specs(plan):
            tensors[spec.name] = held(getattr(self, spec.name))
        return tensors


class TrainableLinear(QuantizedLinear):
    """A linear layer that computes in float8 and trains its float weight."""

    def operands(self, plan: Plan) -> dict[str, Any]:
        assert self._policy_form is not None
        kernel = getattr(self, self._policy_adapter.weight)
        tensors = {"weight": self._policy_form.axes.to_file(keras.ops, raw(kernel))}
        for spec in state_specs(plan):
            if hasattr(self, spec.name):
                tensors[spec.name] = held(getattr(self, spec.name))
        joined = getattr(self, GRADIENT_STATE, None)
        if joined is not None:
            state = raw(joined)
            if training_argument():
                state = PRODUCTS.opened(joined, state)  # type: ignore[attr-defined]
            tensors["output_grad_scale"] = state[0]
            tensors["output_grad_amax_history"] = state[1:]
        return tensors

    def keep(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if hasattr(self, name):
                getattr(self, name).assign(value)
        joined = getattr(self, GRADIENT_STATE, None)
        if joined is not None:
            scale = ops.reshape(state["output_grad_scale"], (1,))
            joined.assign(ops.concatenate([scale, state["output_grad_amax_history"]]))

    def rows(self, ids: Any) -> Any:
        """Gives rows of the float weight in the compute dtype."""
        kernel = raw(getattr(self, self._policy_adapter.weight))
        return ops.cast(ops.take(kernel, _as_ids(ids), axis=0), self.policy_plan.compute_dtype)


@functools.lru_cache(maxsize=4096)
def _in_dtype(plan: Plan, dtype: str) -> Plan:
    return dataclasses.replace(plan, compute_dtype=dtype)


def _as_ids(ids: Any) -> Any:
    integer = keras.backend.standardize_dtype(ids.dtype) in ("int32", "int64")
    return ids if integer else ops.cast(ids, "int32")
