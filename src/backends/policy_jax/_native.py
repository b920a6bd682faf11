"""The CPU kernels as XLA FFI calls, and how vmap and sharding see the calls."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import policy_kernels
from policy_kernels import _loader

from ._ops import Array, numpy_dtype
from ._packed import CODES, UNPACK_TARGET, is_packed
from ._spread import CHANNELS, row_names, spread

TARGET, ENCODE_TARGET = "policy_jax_linear", "policy_jax_encode"
"""The targets' names in XLA, which exported programs and their safety checks name."""
LIBRARY_NAME = "libpolicy_jax.so"
OPERATIONS = {"linear_s8": 0, "linear_s8w": 1, "linear_f8": 2, "linear_f8w": 3}
_FUNCTIONS = (
    "pk_last_error",
    "pk_packed_bytes",
    "pk_pack",
    "pk_unpack",
    "pk_encode_rows_f8",
    "pk_linear_s8",
    "pk_linear_s8w",
    "pk_linear_f8",
    "pk_linear_f8w",
)
_FLOATS = ("float32", "bfloat16", "float16")


@functools.cache
def reason_against() -> str:
    """Says why XLA on CPU cannot call the kernels; `""` if it can, and then it knows the target.

    Raises:
        KernelsBrokenError: a library is there but cannot be used; that is never passed over.
    """
    if not policy_kernels.available():
        return policy_kernels.build_info().reason or "the native kernels were not built"
    # An editable installation keeps the library and the Python files in two folders.
    import policy_jax

    places = [Path(folder) / LIBRARY_NAME for folder in policy_jax.__path__]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return f"{LIBRARY_NAME} was not built"
    library = ctypes.CDLL(str(path))
    version = library.policy_jax_abi_version()
    if version != _loader.ABI_VERSION:
        raise _loader.KernelsBrokenError(
            f"{path}: expected ABI version {_loader.ABI_VERSION}, got {version}. Install "
            "policy-core again."
        )
    kernels = policy_kernels._loader.library()
    addresses = [ctypes.cast(getattr(kernels, name), ctypes.c_void_p) for name in _FUNCTIONS]
    library.policy_jax_bind((ctypes.c_void_p * len(addresses))(*addresses))
    for name in (TARGET, UNPACK_TARGET, ENCODE_TARGET):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return ""


def available() -> bool:
    """True when XLA on CPU can call the kernels."""
    return not reason_against()


def encode(x: Array, scale: Array, dtype: str) -> Array:
    """Gives the float8 codes of an array under given scales; what is too large saturates.

    Args:
        x: Floats of shape (..., k).
        scale: float32 of shape (..., 1), or () for one scale of the tensor.
        dtype: A float8 format.
    """
    return _encode_call(dtype)(x.astype(jnp.float32), scale)


@functools.lru_cache(maxsize=8)
def _encode_call(dtype: str) -> Any:
    def encode(n: int, x: Array, scale: Array) -> Array:
        call = jax.ffi.ffi_call(ENCODE_TARGET, jax.ShapeDtypeStruct(x.shape, numpy_dtype(dtype)))
        return call(x, scale, code=np.int64(CODES[dtype]))

    @jax.custom_batching.custom_vmap
    def call(x: Array, scale: Array) -> Array:
        rows, last = row_names(x.ndim - 1), ("last",)
        given = [(*rows, *last), (*rows, "") if scale.ndim else ()]
        return spread(encode, 0, given, (*rows, *last), packed=None)(x, scale)

    @call.def_vmap
    def batched(axis_size: int, in_batched: Any, x: Array, scale: Array) -> tuple[Array, bool]:
        x_batched, scale_batched = in_batched
        if not x_batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        if scale_batched and scale.ndim == 1:
            # One scale of each tensor becomes one of each of its rows.
            scale = scale.reshape(axis_size, *(1,) * (x.ndim - 1))
        if scale.ndim:
            scale = jnp.broadcast_to(scale, (*x.shape[:-1], 1))
        return call(x, scale), True

    return call


def linear(
    operation: str,
    shape: tuple[int, int],
    codes_dtype: str,
    dtype: str,
    x: Array,
    weight: Array,
    scale: Array,
    bias: Array | None,
    x_scale: Array | None = None,
) -> Array:
    """Gives a product by the kernels.

    Args:
        operation: One of `OPERATIONS`.
        shape: (n, k).
        codes_dtype: What the weight holds.
        dtype: The result's.
        x: Floats, or for linear_f8 codes, of shape (..., k).
        weight: Packed, or codes of shape (n, k), which each call packs.
        scale: float32 of shape (n,) or ().
        bias: Floats of shape (n,), or None.
        x_scale: For linear_f8 float32 of shape (..., 1) or ().

    Returns:
        Floats of shape (..., n).
    """
    if x_scale is None and x.dtype.name not in _FLOATS:
        x = x.astype(jnp.float32)
    result = dtype if dtype in _FLOATS else "float32"
    rest = [weight, scale] if bias is None else [weight, scale, _narrow(bias)]
    call = _call(operation, shape, codes_dtype, result)
    moving = [x] if x_scale is None else [x, x_scale]
    return call(moving, rest).astype(numpy_dtype(dtype))


def _narrow(bias: Array) -> Array:
    return bias if bias.dtype.name in _FLOATS else bias.astype(jnp.float32)


@functools.lru_cache(maxsize=4096)
def _call(operation: str, shape: tuple[int, int], codes_dtype: str, dtype: str) -> Any:
    n, k = shape
    attributes = {
        "operation": np.int64(OPERATIONS[operation]),
        "k": np.int64(k),
        "code": np.int64(CODES[codes_dtype]),
    }

    def product(n: int, x: Array, *operands: Array) -> Array:
        out = jax.ShapeDtypeStruct((*x.shape[:-1], n), numpy_dtype(dtype))
        return jax.ffi.ffi_call(TARGET, out)(x, *operands, n=np.int64(n), **attributes)

    @jax.custom_batching.custom_vmap
    def call(moving: list[Array], rest: list[Array]) -> Array:
        rows = row_names(moving[0].ndim - 1)
        weight, *channels = rest
        given = [(*rows, "") if array.ndim else () for array in moving]
        given.append((CHANNELS, ""))
        given += [(CHANNELS,) if array.ndim else () for array in channels]
        packed = len(moving) if is_packed(weight) else None
        return spread(product, n, given, (*rows, CHANNELS), packed)(*moving, *rest)

    @call.def_vmap
    def batched(axis_size: int, in_batched: Any, moving: Any, rest: Any) -> tuple[Array, bool]:
        moving_batched, rest_batched = in_batched
        whole = moving_batched[0] and not any(rest_batched)
        if whole and len(moving) == 2 and moving[1].ndim > 0:
            whole = moving_batched[1] and moving[1].ndim > 1
        if whole:
            # One more leading axis: rows are rows.
            return call(moving, rest), True

        def one(given: Any) -> Array:
            own_moving, own_rest = given
            return call(own_moving, own_rest)

        def spread(arrays: list[Array], batched: list[bool]) -> list[Array]:
            return [
                a if b else jnp.broadcast_to(a, (axis_size, *a.shape))
                for a, b in zip(arrays, batched, strict=True)
            ]

        return jax.lax.map(one, (spread(moving, moving_batched), spread(rest, rest_batched))), True

    return call
