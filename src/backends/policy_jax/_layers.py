"""How a wrapped layer computes: casts, products on codes, their gradients, delayed-scaling state."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from policy_core import _scaling
from policy_core._casting import convert
from policy_core._plan import STATE_SUFFIXES, Plan
from policy_core._scaling import AmaxState

from . import _delayed, _kernels, _native, _packed
from ._kernels import Operand
from ._ops import OPS, Array, numpy_dtype
from ._quantize import encode, quantize
from ._spread import explicit_mesh, rows_sharding, taken_sharding, typed_sharding

Tensors = dict[str, Array]


class Recipe(NamedTuple):
    """What of a plan a call depends on; layers that differ in paths alone share compiled code.

    Attributes are those of `policy_core._plan.Plan`, but:
        shape: The weight's (n, k).
        native: Whether policy_kernels multiplies.
        training: Whether delayed-scaling state moves.
    """

    weight_codes: str
    input_codes: str | None
    gradient_codes: str | None
    delayed: bool
    trainable: bool
    compute_dtype: str
    variable_dtype: str
    shape: tuple[int, int]
    native: bool
    training: bool


@functools.lru_cache(maxsize=4096)
def recipe(plan: Plan, training: bool = False) -> Recipe:
    """Gives the recipe of a quantized linear layer."""
    assert plan.weight_codes is not None
    return Recipe(
        weight_codes=plan.weight_codes,
        input_codes=plan.input_codes,
        gradient_codes=plan.gradient_codes,
        delayed=plan.delayed,
        trainable=plan.trainable,
        compute_dtype=plan.compute_dtype,
        variable_dtype=plan.variable_dtype,
        shape=next(spec.shape for spec in plan.storage if spec.name == "weight"),  # type: ignore[arg-type]
        native=_kernels.is_native(plan.kernel),
        training=training and plan.delayed and plan.trainable,
    )


def linear(how: Recipe, x: Array, tensors: Tensors) -> tuple[Array, Tensors]:
    """Gives a quantized linear layer's product, as docs/numerics.md says.

    Args:
        how: From `recipe`.
        x: Floats of shape (..., k).
        tensors: The layer's stored tensors, those of `plan.storage`.

    Returns:
        Floats of shape (..., n) in the compute dtype, and all state tensors after the call, by
        name; outside training, and for inputs without rows, those that were given.

    Raises:
        ValueError: The last axis of `x` has another size than the weight's.
        TypeError: `x` is complex.
    """
    width = how.shape[1]
    if x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"Expected an input of shape (..., {width}). Received shape {x.shape}.")
    x = _real(x)
    if x.size == 0:
        how = how._replace(training=False)
    call = functools.partial(_jitted_linear, how)
    weight = tensors["weight"]
    mesh = explicit_mesh(x, weight)
    if mesh is not None:
        # XLA's partitioner spreads what is inside; its ends have the types that JAX then knows.
        state = {n: typed_sharding(mesh, t) for n, t in tensors.items() if is_state(n, tensors)}
        call = jax.sharding.auto_axes(call, out_sharding=(rows_sharding(mesh, x, weight), state))
    return call(x, tensors)


def _real(x: Array) -> Array:
    """Gives integers, booleans and floats of 8 bits by their values, floats as they are."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"Expected real inputs: codes have no imaginary part. Received dtype {x.dtype}."
        )
    floats = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
    return x if floats else x.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(how: Recipe, x: Array, tensors: Tensors) -> tuple[Array, Tensors]:
    return _forward(how, x, tensors)[0]


_jitted_linear = jax.jit(_linear, static_argnums=0)


def _forward(how: Recipe, x: Array, tensors: Tensors) -> tuple[tuple[Array, Tensors], Any]:
    bias = tensors.get("bias")
    state = {name: t for name, t in tensors.items() if is_state(name, tensors)}
    if how.input_codes == "float8_e4m3fn":
        x_codes, x_scale = _input_codes(how, x, tensors, state)
        codes, scale = _weight_codes(how, tensors, state)
        if how.training:
            # Under vmap only the batch knows whether there are rows; without any nothing moves.
            _, any_rows = _delayed.batch_amax(x, tensors["input_amax_history"])
            state = {n: jnp.where(any_rows, after, tensors[n]) for n, after in state.items()}
    else:
        codes, scale = tensors["weight"], tensors["weight_scale"].reshape(-1)
        x_codes = x_scale = None
    if how.native:
        operation = "linear_f8" if x_scale is not None else _operation(how)
        given = x if x_codes is None else x_codes
        kinds = (operation, how.shape, how.weight_codes, how.compute_dtype)
        y = _native.linear(*kinds, given, codes, scale, bias, x_scale)
    elif x_codes is not None:
        y = _kernels.linear_f8(x_codes, x_scale, codes, scale, bias)
    elif how.input_codes:
        y = _kernels.linear_s8(x, codes, scale, bias)
    else:
        y = _kernels.linear_weight_only(x, codes, scale, bias)
    multiplied = (x_codes, x_scale) if how.trainable else None
    names = dict.fromkeys(tensors)
    residuals = (multiplied, codes, scale, _role(tensors, "output_grad"), names)
    return (y.astype(numpy_dtype(how.compute_dtype)), state), residuals


def _operation(how: Recipe) -> str:
    if how.input_codes:
        return "linear_s8"
    return "linear_s8w" if how.weight_codes == "int8" else "linear_f8w"


def _backward(how: Recipe, residuals: Any, cotangents: Any) -> tuple[Array, dict[str, Any]]:
    multiplied, codes, scale, gradient_state, names = residuals
    dy, told = cotangents
    dy = dy.astype(jnp.float32)
    result: dict[str, Any] = {}
    variable_dtype = numpy_dtype(how.variable_dtype)
    leading = tuple(range(dy.ndim - 1))
    if "bias" in names:
        result["bias"] = dy.sum(leading).astype(variable_dtype)
    # Calls outside training, and without rows, hand on what the calls after them told.
    if gradient_state is not None and not how.training:
        result.update({name: told[name] for name in _named("output_grad", gradient_state)})
    g: Operand = (dy, None)
    if how.gradient_codes is not None and dy.size and (how.trainable or not how.delayed):
        g = _gradient(how, dy, gradient_state, _role(told, "output_grad"), result)
    multiply = functools.partial(_kernels.gradient_product, how.native, how.compute_dtype, g)
    if multiplied is not None:
        result["weight"] = multiply(multiplied, (leading, leading)).astype(variable_dtype)
    column = scale if scale.ndim == 0 else scale[:, None]
    if _packed.is_packed(codes):
        codes = _packed.unpacked_inside(codes, how.shape, how.weight_codes)
    dx = multiply((codes, column), ((dy.ndim - 1,), (0,)))
    # None is every dtype's "no gradient": float0 for integer codes, zeros for scales and states.
    return dx.astype(numpy_dtype(how.compute_dtype)), {name: result.get(name) for name in names}


def _kept_for_backward(how: Recipe, x: Array, tensors: Tensors) -> tuple[Any, Any]:
    if how.trainable:
        return _forward(how, x, tensors)
    # By `_linear` itself, so that a second derivative meets this rule again, and no kernel.
    scale = tensors["weight_scale"].reshape(() if how.delayed else (-1,))
    state = _role(tensors, "output_grad")
    residuals = (None, tensors["weight"], scale, state, dict.fromkeys(tensors))
    return _linear(how, x, tensors), residuals


_linear.defvjp(_kept_for_backward, _backward)


def _gradient(
    how: Recipe, dy: Array, state: AmaxState | None, told: AmaxState | None, result: Tensors
) -> Operand:
    """Gives the output gradient's codes and scale, and in training adds what it tells."""
    assert how.gradient_codes is not None
    if state is None:
        empty = _delayed.no_state(1)
        amax_now, _ = _delayed.batch_amax(dy, empty.amax_history)
        scale, _ = _delayed.training_scale(empty, amax_now, how.gradient_codes)
    else:
        amax_now, _ = _delayed.batch_amax(dy, state.amax_history)
        if how.training:
            assert told is not None
            scale, tells = _delayed.backward_scale(state, told, amax_now, how.gradient_codes)
            result.update(_named("output_grad", tells))
        else:
            scale = _delayed.inference_scale(state, amax_now, how.gradient_codes)
    return _encoded(how, dy, scale, how.gradient_codes), scale


def is_state(name: str, tensors: Any) -> bool:
    """Says whether a tensor is delayed-scaling state, and not the scale of stored codes."""
    return name.endswith(STATE_SUFFIXES) and (
        not name.endswith("_scale") or name.removesuffix("scale") + "amax_history" in tensors
    )


def _named(role: str, state: AmaxState) -> Tensors:
    return {f"{role}_scale": state.scale, f"{role}_amax_history": state.amax_history}


def _role(tensors: Tensors, role: str) -> AmaxState | None:
    history = tensors.get(f"{role}_amax_history")
    return None if history is None else AmaxState(tensors[f"{role}_scale"], history)


def _input_codes(how: Recipe, x: Array, tensors: Tensors, state: Tensors) -> tuple[Array, Array]:
    assert how.input_codes is not None
    if how.delayed:
        role = _role(tensors, "input")
        assert role is not None
        amax_now, _ = _delayed.batch_amax(x, role.amax_history)
        scale = _delayed_scale(how, "input", role, amax_now, how.input_codes, state)
        return _encoded(how, x, scale, how.input_codes), scale
    return _quantized(how, x, how.input_codes)


def _weight_codes(how: Recipe, tensors: Tensors, state: Tensors) -> tuple[Array, Array]:
    weight = tensors["weight"]
    if not how.trainable:
        return weight, tensors["weight_scale"].reshape(() if how.delayed else (-1,))
    if how.delayed:
        role = _role(tensors, "weight")
        assert role is not None
        amax_now = jnp.max(jnp.abs(weight.astype(jnp.float32)), initial=0.0)
        scale = _delayed_scale(how, "weight", role, amax_now, how.weight_codes, state)
        return _encoded(how, weight, scale, how.weight_codes), scale
    codes, column = _quantized(how, weight, how.weight_codes)
    return codes, column.reshape(-1)


def _quantized(how: Recipe, x: Array, dtype: str) -> tuple[Array, Array]:
    """Gives float8 codes and a scale for each row."""
    if not how.native:
        return quantize(x, dtype, (x.ndim - 1,))
    scale = _scaling.scale_of(OPS, _scaling.amax(OPS, x, (x.ndim - 1,)), dtype)
    return _encoded(how, x, scale, dtype), scale


def _encoded(how: Recipe, x: Array, scale: Array, dtype: str) -> Array:
    """Gives float8 codes under a given scale, which XLA on CPU makes several times slower."""
    return _native.encode(x, scale, dtype) if how.native else encode(x, scale, dtype)


def _delayed_scale(
    how: Recipe, role: str, before: AmaxState, amax_now: Array, dtype: str, state: Tensors
) -> Array:
    """Gives the scale of one tensor role, and in training puts its next state into `state`."""
    if not how.training:
        return _delayed.inference_scale(before, amax_now, dtype)
    scale, after = _delayed.training_scale(before, amax_now, dtype)
    state.update(_named(role, after))
    return scale


@functools.partial(jax.jit, static_argnums=0)
def frozen_weight(how: Recipe, tensors: Tensors) -> tuple[Array, Array]:
    """Gives the weight's codes and scales as a trainable layer uses them outside training.

    Returns:
        Codes of shape (n, k), and float32 scales of shape (n, 1), or (1, 1) for one of the tensor.
    """
    codes, scale = _weight_codes(how._replace(training=False), tensors, {})
    return codes, scale.reshape((1, 1) if how.delayed else (-1, 1))


def embedding(codes: Array, scale: Array, ids: Array, dtype: str) -> Array:
    """Gives the rows of a quantized table in a dtype; arguments as `_kernels.rows` takes them."""
    call = functools.partial(_embedding, dtype)
    mesh = explicit_mesh(ids, codes)
    if mesh is not None:
        call = jax.sharding.auto_axes(call, out_sharding=taken_sharding(mesh, ids))
    return call(codes, scale, ids)


@functools.partial(jax.jit, static_argnums=0)
def _embedding(dtype: str, codes: Array, scale: Array, ids: Array) -> Array:
    return _kernels.rows(codes, jax.lax.stop_gradient(scale), ids, numpy_dtype(dtype))


def inside_dtype(plan: Plan, kind: str) -> str:
    """Gives the dtype in which a float layer computes, norms in float32 or wider."""
    # The square of a float16 overflows at 256.
    return plan.accumulator if kind == "norm" else plan.compute_dtype


def cast_nest(x: Any, dtype: str) -> Any:
    """Gives a nest of arguments or results with its floats in a dtype."""
    return convert(x, dtype, True)
