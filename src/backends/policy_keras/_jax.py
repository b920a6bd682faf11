"""Products where Keras runs on JAX; `_kernels.Products` says what each function gives.

`model.export` hands the computation to TensorFlow, which runs no calls of the kernels: there, and there
alone, XLA's own products are taken.

Keras's JAX trainer keeps variables as values: what a call writes comes out of a scope. The state of
an output gradient is known in the backward pass alone, and comes out as the variable's gradient,
which Keras's optimizers write into variables with `overwrite_with_gradient`.
"""

import functools
import sys
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import NamedSharding

from policy_core._forms import Axes
from policy_core._plan import Plan
from policy_core._scaling import AmaxState
from policy_jax import _delayed, _layers, _packed
from policy_jax._kernels import is_native, packed_rows
from policy_jax._kernels import kernel_table as jax_kernel_table
from policy_jax._ops import Array, numpy_dtype, platform
from policy_jax._sites import on_cpu, single_device

from ._keras import raw, scope_of_pass, scope_of_values
from ._kernels import CODES, PACKED
from ._layouts import layout as layout
from ._layouts import layout_of, reason_against

Tensors = dict[str, Array]
_EXPORTED = (
    "On JAX the exported model multiplies with XLA's own products: it is as small, and not as fast. "
    "Save it as a .keras file, and export that under KERAS_BACKEND=tensorflow, to keep the kernels."
)


def kernel_table(tensor: Any, axes: Axes | None) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    device = platform(tensor)
    return device, jax_kernel_table(device, reason_against(tensor, axes))


def place_of(variable: Any) -> NamedSharding | None:
    return layout_of(raw(variable))


def made_at(place: NamedSharding | None) -> AbstractContextManager[None]:
    return nullcontext()


def _packs(plan: Plan) -> bool:
    return plan.quantized and is_native(plan.kernel)


def store(codes: Array, plan: Plan, multiplies: bool) -> tuple[str, Array]:
    if multiplies and _packs(plan) and not single_device(codes) and platform(codes) == "cpu":
        # Whole on one device, to be packed there: the variable is spread when it is made.
        codes = jnp.asarray(np.asarray(codes))
    if multiplies and _packs(plan) and on_cpu(codes):
        return PACKED, _packed.packed(codes)
    return CODES, codes


def restore(stored: Array, shape: tuple[int, int], dtype: str) -> Array:
    return _packed.unpacked(stored, shape, dtype) if _packed.is_packed(stored) else stored


def linear(
    plan: Plan,
    shape: tuple[int, int],
    x: Array,
    tensors: Tensors,
    training: bool,
    group: None,
) -> tuple[Array, Tensors]:
    if not isinstance(x, jax.Array):
        x = keras.ops.convert_to_tensor(x, sparse=False)
    how = _layers.recipe(plan, training)
    if how.native and _traced_by_tensorflow():
        warnings.warn(_EXPORTED, stacklevel=2)
        how, weight = how._replace(native=False), tensors["weight"]
        if _packed.is_packed(weight):
            codes = _packed.unpacked_anywhere(weight, shape, how.weight_codes)
            tensors = {**tensors, "weight": codes}
    y, state = _layers.linear(how, x, tensors)
    return y, state


def _traced_by_tensorflow() -> bool:
    if "tensorflow" not in sys.modules:
        return False
    import tensorflow as tf

    return bool(tf.inside_function())


def rows(plan: Plan, shape: tuple[int, int], ids: Array, stored: Array, scale: Array) -> Array:
    if not _packed.is_packed(stored):
        return _layers.embedding(stored, scale, ids, plan.compute_dtype)
    return _packed_rows(shape, str(plan.weight_codes), plan.compute_dtype, stored, scale, ids)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _packed_rows(
    shape: tuple[int, int], codes: str, dtype: str, packed: Array, scale: Array, ids: Array
) -> Array:
    scale = jax.lax.stop_gradient(scale)
    return packed_rows(packed, shape, codes, scale, ids, numpy_dtype(dtype))


def frozen_weight(plan: Plan, tensors: Tensors) -> tuple[Array, Array]:
    codes, scale = _layers.frozen_weight(_layers.recipe(plan), tensors)
    return codes, scale


class GradientState(keras.Variable):  # type: ignore[misc]  # it is JAX's kind of variable here
    """The state of one layer's output gradient: its scale, then its amax history.

    Invariant: the scale is positive. A layer that took no part in a loss has the gradient 0 there,
    and keeps its state.
    """

    def assign(self, value: Any) -> Any:
        value = self._convert_to_tensor(value, dtype=self._dtype)
        # Keras's trainer takes values away while it runs, or hands their memory to the step, and
        # puts them back with assign.
        own = self._value
        gone = own is None or (isinstance(own, jax.Array) and own.is_deleted())
        if scope_of_values() is not None or not gone:
            value = jnp.where(value[0] > 0, value, self.value)
        return super().assign(value)


def gradient_state(layer: Any, name: str, value: Any, layout: Any) -> GradientState:
    options = {"dtype": "float32", "autocast": False, "name": name, "layout": layout}
    with layer._open_name_scope():
        state = GradientState(value, trainable=True, **options)
    state.overwrite_with_gradient = True
    return state


_OPENED: "weakref.WeakKeyDictionary[Any, set[int]]" = weakref.WeakKeyDictionary()


def opened(variable: GradientState, state: Array) -> Array:
    """Gives the state of an output gradient for one call of its layer.

    The first call in a pass is where what all backward calls told becomes the next state. A second
    call of the same layer must hand on what was told to it: two gradients would be added up.
    """
    scope = scope_of_pass()
    if scope is None:
        return state
    seen = _OPENED.setdefault(scope, set())
    if id(variable) in seen:
        return state
    seen.add(id(variable))
    return _opened(state)


@jax.custom_vjp
def _opened(state: Array) -> Array:
    return state


def _opened_backward(state: Array, told: Array) -> tuple[Array]:
    after = _delayed.merge(AmaxState(state[0], state[1:]), AmaxState(told[0], told[1:]))
    return (jnp.concatenate([after.scale.reshape(1), after.amax_history]),)


_opened.defvjp(lambda state: (state, state), _opened_backward)
