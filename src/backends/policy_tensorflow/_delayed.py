"""Delayed-scaling state in variables: when it moves, and what it gives."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs

from policy_core import _scaling

from ._ops import OPS, Tensor

State = tuple[tf.Variable, tf.Variable]
"""The variables of one tensor role: the scale, shape (), and the amax history, shape (length,)."""


class _Scope(threading.local):
    graphs: tuple[Any, ...] = ()


_SCOPE = _Scope()


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Gives a scope in which calls of float8 layers are training calls, which move their state.

    Inside a `tf.function` enter it in the function itself: what a function was traced for is fixed.

    >>> with training():
    ...     pass  # y = model(x)
    """
    before = _SCOPE.graphs
    _SCOPE.graphs = (*before, _function_graph())
    try:
        yield
    finally:
        _SCOPE.graphs = before


def is_training() -> bool:
    """Says whether a call is a training call.

    Raises:
        RuntimeError: A `tf.function` is traced inside `training()`, which was entered outside of
            it: its other calls would train too, or never.
    """
    if not _SCOPE.graphs:
        return False
    if _SCOPE.graphs[-1] is not _function_graph():
        raise RuntimeError(
            "Expected policy_tensorflow.training() to be entered inside the tf.function that calls "
            "float8 layers. It was entered outside, but a function is traced once for all its calls."
        )
    return True


class _Captured:
    """A variable by the handle that a branch or a loop's body has captured.

    The gradients of those reach what the body captured, and no variable by itself. In the graph
    around them each has another name for the variable, so TensorFlow keeps no order among their
    reads and writes.

    Attributes:
        written: The operation that wrote to it last, if any did.
    """

    def __init__(self, variable: Any, graph: Any) -> None:
        self.handle = graph.capture(variable.handle)
        self.dtype, self.shape = variable.dtype, variable.shape
        self.written: tuple[Any, ...] = ()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        return tf.ensure_shape(value, self.shape)

    def assign(self, value: Tensor) -> None:
        self.written = (tf.raw_ops.AssignVariableOp(resource=self.handle, value=value),)


def _for_backward(state: State) -> Any:
    """Gives a state that the gradient of the graph that is being made can read and write."""
    if tf.executing_eagerly():
        return state
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        return state
    return tuple(_Captured(variable, graph) for variable in state)


def _function_graph() -> Any:
    """Gives the graph of the function that is being traced, whatever branch of it; None if eager."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    # Replicas of a strategy trace one function in several threads.
    return graph


def delayed_scale(
    state: State, x: Tensor, dtype: str, moving: bool, rows: Tensor | None = None
) -> Tensor:
    """Gives the scale for a tensor, and in training moves the state of its role.

    Args:
        state: The role's variables.
        x: Floats of any shape.
        dtype: The float8 format of its codes.
        moving: Whether this is a training call. Under `tf.distribute` all replicas must call.
        rows: In training, how many rows the layer's input has: without one nothing moves.

    Returns:
        float32 of shape ().
    """
    before = _scaling.AmaxState(*map(tf.convert_to_tensor, state))

    def largest() -> Tensor:
        return tf.reshape(_scaling.amax(OPS, tf.reshape(x, (-1,)), (0,)), ())

    if not moving:
        if tf.executing_eagerly() and tf.reduce_max(before.amax_history) > 0:
            # What inference_scale gives after a training call, without a look at the input.
            return before.scale
        return _scaling.inference_scale(OPS, before, largest(), dtype)
    amax, rows = _over_replicas(largest(), rows)
    scale, after = _scaling.training_scale(OPS, before, amax, dtype)
    for variable, old, new in zip(state, before, after, strict=True):
        variable.assign(tf.where(rows > 0, new, old))
    return scale


def _over_replicas(largest: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
    """Gives the maximum of an amax over data-parallel replicas, NaN if any is, and all their rows."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return largest, rows
    gathered = context.all_gather(tf.stack([largest, tf.cast(rows, tf.float32)])[None], axis=0)
    return tf.reduce_max(gathered[:, 0]), tf.reduce_max(gathered[:, 1])


def output_scale(state: State | None, moving: bool) -> Any:
    """Gives the function that gives an output gradient's scale, in backward.

    Args:
        state: The state of the role; None for a scale from the values at hand.
        moving: Whether the forward call is a training call.
    """
    state = None if state is None else _for_backward(state)

    def scale(dy: Tensor) -> Tensor:
        if state is None:
            largest = tf.reshape(_scaling.amax(OPS, dy, (0, 1)), ())
            return _scaling.scale_of(OPS, largest, "float8_e5m2")
        # A layer's next call in backward gets a gradient that waits for this one's state.
        with tf.control_dependencies([dy]):
            found = delayed_scale(state, dy, "float8_e5m2", moving, tf.shape(dy)[0])
        written = [op for one in state for op in getattr(one, "written", ())]
        with tf.control_dependencies(written):
            return tf.identity(found)

    return scale
