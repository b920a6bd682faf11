"""The CPU kernels as TensorFlow operators: loaded once, with gradients.

Codes are uint8 tensors, the bits of int8 or float8 codes. A weight is codes of shape (n, k), or a
packed weight: bytes of shape (b,) in the layout that the kernels read. A packed weight's content
depends on its address modulo 64, which is 0 for all memory that TensorFlow allocates.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import policy_kernels
from policy_kernels import _loader

from . import _plain, _vectorized
from ._ops import Tensor, with_shape

LIBRARY_NAME = "libpolicy_tensorflow.so"
OPERATIONS = {"linear_s8": 0, "linear_s8w": 1, "linear_f8": 2, "linear_f8w": 3}
# Numbers of policy_kernels.h: pk_format.
CODES = {"float8_e4m3fn": 0, "float8_e5m2": 1, "int8": 2}
FLOATS = frozenset({tf.float32, tf.bfloat16, tf.float16})
_FUNCTIONS = (
    "pk_last_error",
    "pk_packed_bytes",
    "pk_pack",
    "pk_unpack",
    "pk_encode_rows_f8",
    "pk_quantize_rows_f8",
    "pk_dequantize_packed_rows",
    "pk_linear_s8",
    "pk_linear_s8w",
    "pk_linear_f8",
    "pk_linear_f8w",
)
_PREFIX = "ImportPolicyCore>"


@functools.cache
def reason_against() -> str:
    """Says why TensorFlow cannot call the kernels; `""` if it can, and then it knows them.

    Raises:
        KernelsBrokenError: a library is there but cannot be used; that is never passed over.
    """
    if not policy_kernels.available():
        return policy_kernels.build_info().reason or "the native kernels were not built"
    # An editable installation keeps the library and the Python files in two folders.
    import policy_tensorflow

    places = [Path(folder) / LIBRARY_NAME for folder in policy_tensorflow.__path__]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return f"{LIBRARY_NAME} was not built"
    # TensorFlow first: it learns of operators only while it loads their library itself.
    try:
        operators = tf.load_op_library(str(path))
        library = ctypes.CDLL(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise _loader.KernelsBrokenError(f"{path}: {error}. Install policy-core again.") from error
    library.policy_tensorflow_problem.restype = ctypes.c_char_p
    version = library.policy_tensorflow_abi_version()
    problem = library.policy_tensorflow_problem().decode()
    if version != _loader.ABI_VERSION:
        problem = f"expected ABI version {_loader.ABI_VERSION}, got {version}"
    if problem:
        raise _loader.KernelsBrokenError(f"{path}: {problem}. Install policy-core again.")
    kernels = policy_kernels._loader.library()
    addresses = [ctypes.cast(getattr(kernels, name), ctypes.c_void_p) for name in _FUNCTIONS]
    library.policy_tensorflow_bind((ctypes.c_void_p * len(addresses))(*addresses))
    version = library.policy_tensorflow_operators_version()
    for name in ("linear", "encode", "quantize_rows", "pack", "unpack", "rows"):
        _OPERATORS[name] = getattr(operators, f"import_policy_core_{name}_v{version}")
    _register(version)
    return ""


def available() -> bool:
    """True when TensorFlow can call the kernels."""
    return not reason_against()


_OPERATORS: dict[str, Callable[..., Any]] = {}


class _Threads:
    """Makes the kernels use as many threads as `tf.config.threading` says, if it says a number.

    Attributes:
        ours: The kernels' number that nobody but us has set.
    """

    def __init__(self) -> None:
        self.done = False
        self.ours = policy_kernels.num_threads() if policy_kernels.available() else 0

    def follow(self) -> None:
        """Looks at TensorFlow's number once, when it can no longer change."""
        if self.done:
            return
        self.done = True
        count = tf.config.threading.get_intra_op_parallelism_threads()
        asked = "POLICY_NUM_THREADS" in os.environ or policy_kernels.num_threads() != self.ours
        if count and not asked:
            policy_kernels.set_num_threads(min(count, 1024))


_THREADS = _Threads()


def linear(
    operation: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    codes: str,
    dtype: tf.DType,
    x_scale: Tensor | None = None,
    x_codes: str = "float8_e4m3fn",
) -> Tensor:
    """Gives a product by the kernels, with the gradients of `x` and `bias`.

    Args:
        operation: One of `OPERATIONS`.
        x: Floats of shape (..., k); for linear_f8 also codes.
        weight: Packed, or codes of shape (n, k).
        scale: float32 of shape (n,).
        bias: Floats of shape (n,), or None.
        codes: The dtype of the weight's codes.
        dtype: The result's.
        x_scale: For linear_f8 of floats, float32 of shape (), or None for a scale per row; for
            codes, float32 of shape () or (...).
        x_codes: The dtype of `x`, if it is codes.
    """
    _THREADS.follow()
    is_codes = x.dtype == tf.uint8
    if not is_codes and (x.dtype not in FLOATS or operation == "linear_f8"):
        x = tf.cast(x, tf.float32)
    if bias is None:
        bias = _NO_BIAS
    elif bias.dtype not in FLOATS:
        bias = tf.cast(bias, tf.float32)
    inside = dtype if dtype in FLOATS else tf.float32
    y = _OPERATORS["linear"](
        x=x,
        x_scale=_NO_SCALE if x_scale is None else x_scale,
        weight=weight,
        scale=scale,
        bias=bias,
        Y=inside,
        operation=OPERATIONS[operation],
        code=CODES[codes],
        x_code=CODES[x_codes],
    )
    return y if inside == dtype else tf.cast(y, dtype)


_NO_BIAS = np.zeros(0, np.float32)
_NO_SCALE = np.zeros(0, np.float32)


def encode_f8(x: Tensor, scale: Tensor, codes: str) -> Tensor:
    """Gives the float8 codes of floats under one scale; what is too large saturates."""
    return _OPERATORS["encode"](x=tf.cast(x, tf.float32), scale=scale, code=CODES[codes])


def quantize_rows_f8(x: Tensor, codes: str) -> tuple[Tensor, Tensor]:
    """Gives the float8 codes of floats of shape (..., k), and the rows' scales, (...)."""
    made = _OPERATORS["quantize_rows"](x=tf.cast(x, tf.float32), code=CODES[codes])
    return made.codes, made.scale


def pack(codes: Tensor, dtype: str) -> Tensor:
    """Gives codes of shape (n, k) packed."""
    return _OPERATORS["pack"](codes=codes, code=CODES[dtype])


def unpack(packed: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Gives the codes that were packed, of a shape (n, k) and a dtype."""
    codes = _OPERATORS["unpack"](packed=packed, code=CODES[dtype], n=shape[0], k=shape[1])
    return tf.ensure_shape(codes, shape)


def rows(
    ids: Tensor, packed: Tensor, shape: tuple[int, ...], codes: str, scale: Tensor, dtype: tf.DType
) -> Tensor:
    """Gives `codes[ids] * scale[ids]` for ids of any shape, from a packed table of shape (n, k)."""
    _THREADS.follow()
    inside = dtype if dtype in FLOATS else tf.float32
    ids = tf.cast(ids, tf.int64)
    y = _OPERATORS["rows"](
        ids=ids, packed=packed, scale=scale, Y=inside, code=CODES[codes], k=shape[1]
    )
    y.set_shape(ids.shape.concatenate(shape[1]))
    return y if inside == dtype else tf.cast(y, dtype)


def _register(version: int) -> None:
    """Makes the operators' gradients and vectorized forms known; both go by the operators' names."""
    names = {
        name: f"{_PREFIX}{''.join(map(str.capitalize, name.split('_')))}V{version}"
        for name in _OPERATORS
    }
    tf.RegisterGradient(names["linear"])(_linear_gradient)
    for name in ("encode", "quantize_rows", "pack", "unpack", "rows"):
        tf.no_gradient(names[name])
    _vectorized.register(names, _OPERATORS)


def _linear_gradient(op: Any, dy: Tensor) -> list[Tensor | None]:
    """Straight through the rounding of `x`; codes and scales have no gradient."""
    x, _, weight, scale, bias = op.inputs
    codes = _name_of(op.get_attr("code"))
    dx = None
    if x.dtype != tf.uint8:
        values = _dequantized(weight, scale, codes, x.shape[-1], tf.shape(x)[-1])
        dx = tf.cast(tf.tensordot(tf.cast(dy, tf.float32), values, 1), x.dtype)
        dx = with_shape(dx, x.shape)
    total = tf.reduce_sum(tf.reshape(tf.cast(dy, tf.float32), (-1, tf.shape(scale)[0])), 0)
    # Of shape [0] where there is no bias.
    dbias = tf.cast(total[: tf.shape(bias)[0]], bias.dtype)
    return [dx, None, None, None, dbias]


def _dequantized(weight: Tensor, scale: Tensor, codes: str, k: int | None, k_now: Tensor) -> Tensor:
    """Gives `codes * scale` in float32, of shape (n, k), for a weight packed or not.

    Args:
        weight: Packed, or codes.
        scale: float32 of shape (n,).
        codes: The dtype of the codes.
        k: The weight's second size; None where a graph does not know it.
        k_now: A tensor that has it.
    """
    if weight.shape.rank == 1:
        n = scale.shape[0]
        if n is None or k is None:
            sizes = tf.stack([tf.shape(scale)[0], k_now])
            weight = _plain.unpacked(weight, sizes)
        else:
            weight = unpack(weight, (n, k), codes)
    return _plain.decode(weight, codes) * scale[:, None]


def _name_of(code: int) -> str:
    return next(name for name, number in CODES.items() if number == code)
