"""Casts of JAX arrays, and of the arrays in a pytree, to a compute dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy_core._dtypes import DTYPES

from ._ops import Array, numpy_dtype

_CASTABLE = frozenset(numpy_dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))
_TARGETS = {
    name: numpy_dtype(name)
    for name, dtype in DTYPES.items()
    if dtype.kind == "float" and (dtype.bits >= 16 or name in ("float8_e4m3fn", "float8_e5m2"))
}


def convert_input(x: Any, dtype: str | None) -> Any:
    """Gives an array cast to `dtype` if it is a float of at least 16 bits, else itself.

    Args:
        x: A JAX array, tracer or PRNG key, or a numpy array, which becomes a JAX array.
        dtype: A canonical float dtype name, or None to cast nothing. Into a float8, which many
            casts overflow to NaN, values saturate.

    Raises:
        ValueError: `dtype` is a float8 format that no mode uses, or float64 while JAX's 64-bit
            types are off.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        x = from_numpy(x)
    if dtype is None:
        return x
    target = _TARGETS.get(dtype)
    if target is None:
        raise ValueError(f"Cannot cast to {dtype!r}. Expected one of {sorted(_TARGETS)}.")
    if x.dtype == target or x.dtype not in _CASTABLE:
        return x
    if target.itemsize == 8 and not _has_64_bits():
        raise ValueError(
            "Cannot cast to 'float64': JAX's 64-bit types are off. Turn them on with "
            "jax.config.update('jax_enable_x64', True), or use a policy of at most 32 bits."
        )
    if target.itemsize == 1:
        largest = DTYPES[dtype].max
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(target)


def cast_tree(tree: Any, dtype: str) -> Any:
    """Gives any pytree with its floating arrays cast; keys, integers and static parts untouched.

    `pc.convert_input` walks dicts, lists, tuples and dataclasses of any framework; this walks
    what JAX knows as a pytree, custom nodes too. What has a policy of its own, such as a quantized
    array with its float32 scales, stays as it is.
    """
    arrays = (jax.Array, np.ndarray, np.generic)
    return jax.tree.map(
        lambda x: convert_input(x, dtype) if isinstance(x, arrays) else x,
        tree,
        is_leaf=lambda node: hasattr(node, "dtype_policy"),
    )


def from_numpy(x: Any) -> Array:
    """Gives a numpy array as a JAX array, bit for bit: 64-bit types are kept."""
    x = np.asarray(x)
    if x.dtype.itemsize == 8 and not _has_64_bits():
        with jax.enable_x64(True):
            return jnp.asarray(x)
    return jnp.asarray(x)


def _has_64_bits() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]  # made at run time
