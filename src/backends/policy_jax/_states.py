"""Float8 state in, state out, for models that are values: what a training call leaves, and where."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from policy_core._plan import STATE_SUFFIXES
from policy_core._scaling import AmaxState

from ._delayed import merge
from ._ops import Array


class Cell:
    """Holds one layer's state tensors while a function runs; a layer that is called twice finds
    in its second call what its first one left.
    """

    def __init__(self, state: dict[str, Array]) -> None:
        self.state = state


def state_of(tensors: dict[str, Any]) -> dict[str, Any]:
    """Gives the delayed-scaling tensors among a layer's tensors."""
    from ._layers import is_state

    return {name: value for name, value in tensors.items() if is_state(name, tensors)}


def apply_gradient_state(model: Any, gradients: Any) -> Any:
    """Gives a model whose output gradients' float8 states have what backward calls told.

    The gradients must have been taken with respect to these states too; across replicas they are
    merged by the maximum first, `jax.lax.pmax`.

    Args:
        model: A flax nnx module, which is updated in place; or any pytree with the states in it: an
            equinox module, linen's variables or their collection `"float8"`, quantized arrays.
        gradients: What `nnx.grad`, `jax.grad`, … gave: the same structure, or a part of it.

    Returns:
        The model: the same object for nnx.

    Raises:
        ValueError: The gradients hold no such state.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        from ._nnx_layers import Float8GradientState

        state = nnx.state(model, Float8GradientState)
        told = (
            nnx.state(gradients, Float8GradientState)
            if isinstance(gradients, nnx.Module)
            else gradients
        )
        nnx.update(model, _merged(state, told))
        return model
    return _merged(model, gradients)


def _merged(tree: Any, gradients: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    told = {_key(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]}
    own = {_key(path): leaf for path, leaf in leaves}
    new: dict[str, Any] = {}
    for key in own:
        if not key.endswith(_SCALE) or key not in told:
            continue
        history = key.removesuffix(_SCALE) + _HISTORY
        merged = merge(AmaxState(own[key], own[history]), AmaxState(told[key], told[history]))
        new[key], new[history] = merged
    if not new:
        raise ValueError(
            "The gradients hold no state of a delayed float8 policy. Differentiate with respect to "
            "it too: with nnx.grad, argnums=nnx.DiffState(0, (nnx.Param, "
            "policy_jax.Float8GradientState))."
        )
    return jax.tree_util.tree_unflatten(structure, [new.get(_key(p), leaf) for p, leaf in leaves])


_SCALE, _HISTORY = "output_grad_scale", "output_grad_amax_history"


def _key(path: Any) -> str:
    """Gives a leaf's place; a variable's value counts as the variable."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def trainable(tree: Any) -> Any:
    """Gives, for each leaf of a model that is a value, whether an optimizer may change it.

    Float leaves are, but codes, their scales and float8 states are not: for `eqx.partition`,
    `eqx.filter`, `optax.masked`.
    """

    def judge(path: Any, leaf: Any) -> bool:
        name = _key(path).rpartition("/")[2]
        dtype = getattr(leaf, "dtype", None)
        return (
            dtype is not None
            and jnp.issubdtype(dtype, jnp.floating)
            and dtype.itemsize > 1
            and not name.endswith(STATE_SUFFIXES)
        )

    return jax.tree_util.tree_map_with_path(judge, tree)
