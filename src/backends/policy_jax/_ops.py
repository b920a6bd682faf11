"""The array functions of `policy_core._scaling.Ops`, in JAX, with the reference's bits under jit.

XLA may rewrite arithmetic that it compiles together: `x / constant` into `x * (1 / constant)`,
`x / (y / z)` into `(x * z) / y`, `a * b + c` into one fused operation. Each rounds differently from
the operations as they are written. `rounded` keeps a value from being rewritten with its user.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Array = Any
"""A jax.Array, a tracer, or what JAX takes for one."""


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """Gives numpy's dtype of a canonical name, ml_dtypes' where numpy has none of its own."""
    return np.dtype(getattr(ml_dtypes, name, name))


def rounded(x: Array) -> Array:
    """Gives a float32 array as it is, but as a value of its own: no user of it is fused with it.

    Neither `optimization_barrier` nor `reduce_precision` does this on CPU: XLA removes both before
    it generates code. A selection stays, because XLA does not know that both sides are equal.
    """
    return jnp.where(x == x, x, jnp.float32(jnp.nan))


def divide(x: Array, y: Array) -> Array:
    """Gives `x / y`, really divided, and rounded by itself."""
    # A divisor that depends on x is no constant whose reciprocal could be taken beforehand.
    return rounded(x / jnp.where(x == x, y, jnp.float32(jnp.nan)))


class Constant:
    """A float32 number that divides and is divided as written, also where XLA sees its value."""

    def __init__(self, value: float) -> None:
        self.value = np.float32(value)

    def __truediv__(self, x: Array) -> Array:
        return rounded(self.value / x)

    def __rtruediv__(self, x: Array) -> Array:
        return divide(x, self.value)


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, Constant) else x


class JaxOps:
    """JAX's side of `Ops`; the protocol says what each function gives."""

    def cast(self, x: Any, dtype: str) -> Any:
        return jnp.asarray(x).astype(numpy_dtype(dtype))

    def amax(self, x: Any, axes: tuple[int, ...]) -> Any:
        return jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)

    def maximum(self, x: Any, y: Any) -> Any:
        return jnp.maximum(_plain(x), _plain(y))

    def clip(self, x: Any, low: float, high: float) -> Any:
        return jnp.clip(x, jnp.float32(low), jnp.float32(high))

    def rint(self, x: Any) -> Any:
        return jnp.rint(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return jnp.where(condition, _plain(x), _plain(y)).astype(jnp.float32)

    def isfinite(self, x: Any) -> Any:
        return jnp.isfinite(x)

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        return jnp.full(shape, value, jnp.float32) if shape else Constant(value)

    def prepend(self, first: Any, rest: Any) -> Any:
        return jnp.concatenate([jnp.reshape(first, (1,)), rest[:-1]])


OPS = JaxOps()


class Shapes:
    """JAX's and numpy's side of `policy_core._forms.Shapes`, which says what each function gives."""

    def transpose(self, x: Any, axes: Any) -> Any:
        return x.transpose(axes)

    def reshape(self, x: Any, newshape: Any) -> Any:
        return x.reshape(newshape)

    def shape(self, x: Any) -> Any:
        return x.shape


SHAPES = Shapes()


def platform(x: Array) -> str:
    """Gives where an array is: `"cpu"`, `"cuda"`, `"tpu"`, …; for tracers the default's."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        name = next(iter(x.devices())).platform
    else:
        name = jax.default_backend()
    return {"gpu": "cuda"}.get(name, name)


def as_numpy(x: Array) -> "np.ndarray":
    """Gives an array's values, without a copy where it is on CPU.

    `np.asarray` would leave the view in the array, and so both alive until a garbage collection.
    """
    whole = x.dtype in _DLPACK and (isinstance(x, np.ndarray) or len(x.devices()) == 1)
    return np.from_dlpack(x) if whole else np.asarray(x)


_DLPACK = frozenset(np.dtype(name) for name in ("float16", "float32", "float64", "int8", "uint8"))


def placed_like(x: "np.ndarray", other: Array) -> Array:
    """Gives a numpy array where another array is, bound to that device only if that one is."""
    return jax.device_put(x, other.sharding if other.committed else None)
