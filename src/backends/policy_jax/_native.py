"""The CPU kernels as XLA FFI calls: packed weights, and how vmap and sharding see the calls."""

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import policy_kernels
from policy_kernels import _loader

from ._ops import Array, as_numpy, numpy_dtype, placed_like
from ._spread import CHANNELS, PANEL, row_names, spread

TARGET, UNPACK_TARGET = "policy_jax_linear", "policy_jax_unpack"
ENCODE_TARGET = "policy_jax_encode"
"""The targets' names in XLA, which exported programs and their safety checks name."""
LIBRARY_NAME = "libpolicy_jax.so"
OPERATIONS = {"linear_s8": 0, "linear_s8w": 1, "linear_f8": 2, "linear_f8w": 3}
# Numbers of policy_kernels.h: pk_format.
_CODES = {"float8_e4m3fn": 0, "float8_e5m2": 1, "int8": 2}
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
_ALIGNMENT = 64
BLOCK, HALF = 64, 16
"""Of a packed weight: k in a block of a panel, and channels in one of its two halves."""


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


def packed(codes: Array) -> Array:
    """Gives codes of shape (n, k) as the kernels read them: uint8 of shape (panels, bytes).

    A panel is 32 channels, so that the first axis may be spread over devices as `n` may.
    """
    plain = np.ascontiguousarray(as_numpy(codes))
    native = policy_kernels._loader.library()
    n, k = plain.shape
    panels = -(-n // PANEL)
    memory = _aligned((panels, _bytes(2 * PANEL, k) - _bytes(PANEL, k)))
    code = _CODES[plain.dtype.name]
    _loader.check(native.pk_pack(code, n, k, plain.ctypes.data, k, memory.ctypes.data))
    return placed_like(memory, codes)


def unpacked(packed: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Gives the codes that were packed, of a shape (n, k) and a dtype."""
    memory = as_numpy(packed)
    if memory.ctypes.data % _ALIGNMENT:
        copy = _aligned(memory.shape)
        copy[...] = memory
        memory = copy
    codes = np.empty(shape, numpy_dtype(dtype))
    native = policy_kernels._loader.library()
    n, k = shape
    _loader.check(native.pk_unpack(_CODES[dtype], n, k, memory.ctypes.data, codes.ctypes.data, k))
    return placed_like(codes, packed)


def unpacked_inside(packed: Array, shape: tuple[int, int], dtype: str) -> Array:
    """Gives the codes that were packed, as a computation: inside jit, for the backward pass."""
    return _unpack_call(shape, dtype)(packed)


def packed_rows(packed: Array, ids: Array, shape: tuple[int, int], dtype: str) -> Array:
    """Gives rows of the codes that were packed, as a computation that reads no others.

    Args:
        packed: What `packed` gave.
        ids: Integers of any shape, at least 0 and less than n.
        shape: (n, k).
        dtype: The dtype of the codes.
    """
    column = np.arange(shape[1], dtype=np.int32)
    block = PANEL * BLOCK
    place = _first_block(packed, shape[1]) + column // BLOCK * block
    place = place + column % BLOCK // 4 * (4 * HALF) + column % 4
    channel = (ids % PANEL).astype(np.int32)[..., None]
    place = place + channel // HALF * (block // 2) + channel % HALF * 4
    bits = packed[(ids // PANEL)[..., None], place]
    return jax.lax.bitcast_convert_type(bits, numpy_dtype(dtype))


def unpacked_anywhere(packed: Array, shape: tuple[int, int], dtype: str) -> Array:
    """Gives the codes that were packed, as a computation without a call of the kernels.

    For programs that run where the kernels are not, such as those that TensorFlow takes.
    """
    n, k = shape
    panels = packed.shape[0]
    blocks = packed[:, _first_block(packed, k) :]
    blocks = blocks.reshape(panels, -1, PANEL // HALF, BLOCK // 4, HALF, 4)
    bits = blocks.transpose(0, 2, 4, 1, 3, 5).reshape(panels * PANEL, -1)[:n, :k]
    return jax.lax.bitcast_convert_type(bits, numpy_dtype(dtype))


def _first_block(packed: Array, k: int) -> int:
    # docs/kernels.md has a picture of a panel: what says what it is, sums, then its blocks.
    return packed.shape[1] - -(-k // BLOCK) * PANEL * BLOCK


@functools.lru_cache(maxsize=4096)
def _unpack_call(shape: tuple[int, int], dtype: str) -> Any:
    n, k = shape

    def unpack(n: int, packed: Array) -> Array:
        out = jax.ShapeDtypeStruct((n, k), numpy_dtype(dtype))
        call = jax.ffi.ffi_call(UNPACK_TARGET, out)
        return call(packed, n=np.int64(n), k=np.int64(k), code=np.int64(_CODES[dtype]))

    call = spread(unpack, n, [(CHANNELS, "")], (CHANNELS, ""), packed=0)
    return jax.custom_batching.sequential_vmap(call)


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
        return call(x, scale, code=np.int64(_CODES[dtype]))

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


def is_packed(weight: Array) -> bool:
    """Says whether a stored weight is in the kernels' layout."""
    return weight.dtype == jnp.uint8


def _bytes(n: int, k: int) -> int:
    size = ctypes.c_int64()
    native = policy_kernels._loader.library()
    _loader.check(native.pk_packed_bytes(n, k, ctypes.addressof(size)))
    return size.value


def _aligned(shape: tuple[int, ...]) -> "np.ndarray":
    # The packed form depends on the address modulo 64, which is 0 for XLA's buffers.
    size = math.prod(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].reshape(shape)


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
        "code": np.int64(_CODES[codes_dtype]),
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
