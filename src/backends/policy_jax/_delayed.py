"""Delayed scaling as pure functions: state in, state out; and how a backward call tells its own.

A backward call cannot write. What it found travels as the cotangent of the state that the forward
call was given: `entries`, a vector of the history's length, newest first, that holds the amax of
each backward call so far (RECORDED_ZERO for one of 0, and 0 where there is none), and the scale
that was used. A layer that is called twice passes its state from call to call, so the second
call's cotangent arrives at the first, which puts its own entry in front: nothing is summed.
"""

import jax
import jax.numpy as jnp

from policy_core import _scaling
from policy_core._scaling import AmaxState

from ._ops import OPS, Array

RECORDED_ZERO = -1.0
"""The entry of a backward call whose gradient was all zeros."""


@jax.custom_batching.custom_vmap
def batch_amax(x: Array, history: Array) -> tuple[Array, Array]:
    """Gives the maximum of `|x|`, under vmap that of the whole batch, and whether there is any.

    A tensor's scale belongs to the state, so a batch that shares one state shares one amax.

    Args:
        x: Floats of any shape.
        history: The state's amax history, float32 of shape (length,).

    Returns:
        float32 scalar, NaN for no elements, which no state records; bool scalar.
    """
    del history
    if x.size == 0:
        return jnp.float32(jnp.nan), jnp.bool_(False)
    return _scaling.amax(OPS, x, tuple(range(x.ndim))).reshape(()), jnp.bool_(True)


@batch_amax.def_vmap
def _batch_amax_of_many(
    axis_size: int, in_batched: list[bool], x: Array, history: Array
) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    x_batched, history_batched = in_batched
    if x_batched and not history_batched:
        return batch_amax(x, history), (False, False)
    if not x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    # Models of their own, each with its own state.
    largest = _scaling.amax(OPS, x, tuple(range(1, x.ndim))).reshape(axis_size)
    return (largest, jnp.ones(axis_size, bool)), (True, True)


def training_scale(state: AmaxState, amax_now: Array, dtype: str) -> tuple[Array, AmaxState]:
    """Gives the scale for a training call, and the state after it."""
    return _scaling.training_scale(OPS, state, amax_now, dtype)


def inference_scale(state: AmaxState, amax_now: Array, dtype: str) -> Array:
    """Gives the scale for a call outside training."""
    return _scaling.inference_scale(OPS, state, amax_now, dtype)


def no_state(length: int) -> AmaxState:
    """Gives the state before any training call, with a history of `length` zeros."""
    return AmaxState(jnp.float32(1), jnp.zeros(length, jnp.float32))


def backward_scale(
    state: AmaxState, told: AmaxState, amax_now: Array, dtype: str
) -> tuple[Array, AmaxState]:
    """Gives the scale for a backward call in training, and what it tells.

    Args:
        state: The output gradient's state that the forward call was given.
        told: What later forward calls' backward calls, which ran already, tell.
        amax_now: float32 scalar, the amax of the output gradient.
        dtype: The float8 format of its codes.
    """
    scale, _ = training_scale(merge(state, told), amax_now, dtype)
    seen = jnp.isfinite(amax_now)
    entry = jnp.where(amax_now > 0, amax_now, RECORDED_ZERO)
    entries = jnp.where(seen, OPS.prepend(entry, told.amax_history), told.amax_history)
    return scale, AmaxState(jnp.where(jnp.isfinite(scale), scale, told.scale), entries)


def merge(state: AmaxState, told: AmaxState) -> AmaxState:
    """Gives the state after the backward calls that told their entries.

    Replicas merge what they were told by the maximum first (`jax.lax.pmax`).
    """
    history, entries = state.amax_history, told.amax_history
    length = history.shape[0]
    count = jnp.sum(entries != 0)
    index = jnp.arange(length)
    older = history[jnp.clip(index - count, 0, length - 1)]
    merged = jnp.where(index < count, jnp.maximum(entries, 0), older)
    return AmaxState(jnp.where(told.scale > 0, told.scale, state.scale), merged)
