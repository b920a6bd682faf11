"""Codes as the kernels read them, in panels of 32 channels, and the ways back to plain codes."""

import ctypes
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import policy_kernels
from policy_kernels import _loader

from ._ops import Array, as_numpy, numpy_dtype, placed_like
from ._spread import CHANNELS, PANEL, spread

UNPACK_TARGET = "policy_jax_unpack"
"""The name in XLA of the call that unpacks."""
# Numbers of policy_kernels.h: pk_format.
CODES = {"float8_e4m3fn": 0, "float8_e5m2": 1, "int8": 2}
_ALIGNMENT = 64
BLOCK, HALF = 64, 16
"""Of a packed weight: k in a block of a panel, and channels in one of its two halves."""


def packed(codes: Array) -> Array:
    """Gives codes of shape (n, k) as the kernels read them: uint8 of shape (panels, bytes).

    A panel is 32 channels, so that the first axis may be spread over devices as `n` may.
    """
    plain = np.ascontiguousarray(as_numpy(codes))
    native = policy_kernels._loader.library()
    n, k = plain.shape
    panels = -(-n // PANEL)
    memory = _aligned((panels, _bytes(2 * PANEL, k) - _bytes(PANEL, k)))
    code = CODES[plain.dtype.name]
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
    _loader.check(native.pk_unpack(CODES[dtype], n, k, memory.ctypes.data, codes.ctypes.data, k))
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
    panels, bits = packed.shape[0], packed[:, _first_block(packed, k) :]
    # In steps of four k, which stay together: XLA moves a byte as slowly as four.
    fours = jax.lax.bitcast_convert_type(bits.reshape(panels, -1, 4), jnp.uint32)
    fours = fours.reshape(panels, -1, PANEL // HALF, BLOCK // 4, HALF).transpose(0, 2, 4, 1, 3)
    codes = jax.lax.bitcast_convert_type(fours, numpy_dtype(dtype))
    return codes.reshape(panels * PANEL, -1)[:n, :k]


def _first_block(packed: Array, k: int) -> int:
    # docs/kernels.md has a picture of a panel: what says what it is, sums, then its blocks.
    return packed.shape[1] - -(-k // BLOCK) * PANEL * BLOCK


@functools.lru_cache(maxsize=4096)
def _unpack_call(shape: tuple[int, int], dtype: str) -> Any:
    n, k = shape

    def unpack(n: int, packed: Array) -> Array:
        out = jax.ShapeDtypeStruct((n, k), numpy_dtype(dtype))
        call = jax.ffi.ffi_call(UNPACK_TARGET, out)
        return call(packed, n=np.int64(n), k=np.int64(k), code=np.int64(CODES[dtype]))

    call = spread(unpack, n, [(CHANNELS, "")], (CHANNELS, ""), packed=0)
    return jax.custom_batching.sequential_vmap(call)


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
