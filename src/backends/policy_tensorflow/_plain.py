"""Products with codes in TensorFlow's own operators: for XLA, other devices, and builds without
native kernels.

Codes are uint8 tensors, the bits of int8 or float8 codes, of shape (n, k). For int8 the sums are
exact, so the bits are the reference's; float8 keeps docs/numerics.md's bound.
"""

import numpy as np
import tensorflow as tf

from policy_core import _scaling
from policy_core._dtypes import DTYPES

from ._ops import OPS, TF_DTYPES, Tensor, divide, in_xla, rounded

MAX_CONTRACTION = 131_072
"""So many int8 products always fit an int32 sum; longer ones are added in float32."""

EXACT_IN_FLOAT32 = 1024
"""So many int8 products, each at most 127 squared, have a sum below 2**24."""

_PANEL, _BLOCK = 32, 64
_HEADER = 64


def decode(codes: Tensor, dtype: str) -> Tensor:
    """Gives the float32 value of each code, from its bits; exact.

    A float8_e5m2 is the upper half of a float16. A float8_e4m3fn has one exponent bit less, and the
    bias 7 for 15: in a float16's place it is 2**-8 of its value.
    """
    if dtype == "int8":
        return tf.cast(tf.bitcast(codes, tf.int8), tf.float32)
    bits = tf.cast(codes, tf.uint16)
    if dtype == "float8_e5m2":
        return tf.cast(tf.bitcast(tf.bitwise.left_shift(bits, _u16(8)), tf.float16), tf.float32)
    sign = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bits, _u16(0x80)), _u16(8))
    magnitude = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bits, _u16(0x7F)), _u16(7))
    half = tf.bitcast(tf.bitwise.bitwise_or(sign, magnitude), tf.float16)
    values = tf.cast(half, tf.float32) * 256.0
    nan = tf.equal(magnitude, _u16(0x7F << 7))
    return tf.where(nan, tf.constant(np.nan, tf.float32), values)


def _u16(value: int) -> np.uint16:
    return np.uint16(value)


# Of each float8 format: the bits of its mantissa, and its smallest normal number.
_GRIDS = {"float8_e4m3fn": (3, 2.0**-6), "float8_e5m2": (2, 2.0**-14)}


def encode(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Gives floats as float8 tensors under a scale; what is too large saturates."""
    return tf.cast(on_grid(x, scale, dtype), TF_DTYPES[dtype])


def on_grid(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Gives the float32 values of the float8 codes of floats under a scale.

    `policy_core._scaling.encode`, but divided as written also in graphs, with subnormal numbers
    where TensorFlow takes them for zeros, and without a cast: XLA's cast from float32 to float8 on
    CPU rounds twice in some programs, by way of float16.
    """
    largest = np.float32(DTYPES[dtype].max)
    mantissa, smallest = _GRIDS[dtype]
    x = tf.cast(x, tf.float32)
    quotient = divide(x, scale)
    if dtype == "float8_e5m2":
        # Its range is wide enough to hold a subnormal float32 under the smallest scale.
        bits = tf.bitcast(x, tf.uint32)
        subnormal = tf.equal(tf.bitwise.bitwise_and(bits, np.uint32(0x7F800000)), np.uint32(0))
        raised = divide(_raised(bits), scale * np.float32(2.0**100))
        quotient = tf.where(subnormal, raised, quotient)
    clipped = tf.clip_by_value(quotient, -largest, largest)
    step = smallest * 2.0**-mantissa
    small = tf.round(clipped * np.float32(1 / step)) * np.float32(step)
    # Half to even, on the bits: what is added carries into the bits that stay.
    dropped = 23 - mantissa
    bits = tf.bitcast(clipped, tf.int32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, np.int32(dropped)), np.int32(1))
    bits = tf.bitwise.bitwise_and(
        bits + np.int32(2 ** (dropped - 1) - 1) + odd, np.int32(-(2**dropped))
    )
    values = tf.where(tf.abs(clipped) < np.float32(smallest), small, tf.bitcast(bits, tf.float32))
    return tf.where(quotient == quotient, values, tf.constant(np.nan, tf.float32))


def _raised(bits: Tensor) -> Tensor:
    """Gives `x * 2**100` for zeros and subnormal numbers, `mantissa * 2**-149`, from their bits."""
    mantissa = tf.bitwise.bitwise_and(bits, np.uint32(0x007FFFFF))
    magnitude = tf.cast(tf.cast(mantissa, tf.int32), tf.float32) * np.float32(2.0**-49)
    negative = tf.greater(bits, np.uint32(0x7FFFFFFF))
    return tf.where(negative, -magnitude, magnitude)


def unpacked(packed: Tensor, shape: Tensor, dtype: str) -> Tensor:
    """Gives the codes of a packed weight; docs/kernels.md has a picture of the layout.

    Args:
        packed: Bytes of shape (b,).
        shape: (n, k), numbers or a tensor.
        dtype: The dtype of the codes.
    """
    n, k = shape[0], shape[1]
    panels, blocks = -(-n // _PANEL), -(-k // _BLOCK)
    parts = -(-k // MAX_CONTRACTION) if dtype == "int8" else 0
    start = _HEADER + parts * panels * _PANEL * 4
    bytes_ = packed[start : start + panels * blocks * _PANEL * _BLOCK]
    # panel, block, half, four k, channel of the half, k of the four
    lines = tf.reshape(bytes_, tf.stack([panels, blocks, 2, 16, 16, 4]))
    matrix = tf.transpose(lines, (0, 2, 4, 1, 3, 5))
    return tf.reshape(matrix, tf.stack([panels * _PANEL, blocks * _BLOCK]))[:n, :k]


def linear(
    operation: str,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    *,
    dtype: str,
    x_scale: Tensor | None = None,
) -> Tensor:
    """Gives a product in float32; for linear_f8 the floats `x` are encoded on the way.

    Args:
        operation: `"linear_s8"`, `"linear_s8w"`, `"linear_f8"` or `"linear_f8w"`.
        x: Floats of shape (m, k).
        codes: uint8 of shape (n, k).
        scale: float32 of shape (n,).
        bias: Floats of shape (n,), or None.
        dtype: The dtype of the weight's codes.
        x_scale: For linear_f8, float32 of shape (), or None for a scale per row.
    """
    x = tf.cast(x, tf.float32)
    if operation == "linear_s8":
        return _linear_s8(x, tf.bitcast(codes, tf.int8), scale, bias)
    values = decode(codes, dtype)
    if operation != "linear_f8":
        return scaled(product(x, values), None, scale, bias)
    if x_scale is None:
        x_scale = _scaling.scale_of(OPS, OPS.amax(x, (1,)), "float8_e4m3fn")
    return scaled(product(on_grid(x, x_scale, "float8_e4m3fn"), values), x_scale, scale, bias)


def _linear_s8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    x_codes, x_scale = _scaling.quantize(OPS, x, "int8", (1,))
    k = codes.shape[1]
    total = None
    for start in range(0, max(k, 1), MAX_CONTRACTION):
        part = slice(start, start + MAX_CONTRACTION)
        exact = tf.cast(_product_s8(x_codes[:, part], codes[:, part]), tf.float32)
        total = exact if total is None else rounded(total + exact)
    return scaled(total, x_scale, scale, bias)


def _product_s8(x: Tensor, codes: Tensor) -> Tensor:
    """Gives the exact `x @ codes.T` of int8, in int32."""
    if in_xla():
        return tf.matmul(x, codes, transpose_b=True, output_type=tf.int32)
    # TensorFlow's own int8 product is a plain loop; float32 sums of so many are exact too.
    sums = [
        tf.cast(product(_floats(x, start), _floats(codes, start)), tf.int32)
        for start in range(0, max(codes.shape[1], 1), EXACT_IN_FLOAT32)
    ]
    return sums[0] if len(sums) == 1 else tf.add_n(sums)


def _floats(codes: Tensor, start: int) -> Tensor:
    return tf.cast(codes[:, start : start + EXACT_IN_FLOAT32], tf.float32)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Gives `x @ weight.T` for matrices of floats."""
    return tf.matmul(x, weight, transpose_b=True)


def as_rows(x: Tensor, k: int | None = None) -> Tensor:
    """Gives floats of shape (..., k) as a matrix; `k` is for a graph that does not know it of `x`."""
    columns = x.shape[-1] if k is None else k
    if x.shape.rank == 2 and x.shape[-1] == columns:
        return x
    # Not (-1, k): a size of 0 would leave the other unknown.
    return tf.reshape(x, tf.stack([tf.reduce_prod(tf.shape(x)[:-1]), columns]))


def scaled(total: Tensor, x_scale: Tensor | None, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Scales, then adds the bias, each rounded to float32 by itself."""
    factor = scale if x_scale is None else rounded(x_scale * scale)
    y = rounded(total * factor)
    return y if bias is None else y + tf.cast(bias, tf.float32)


def as_bits(codes: Tensor) -> Tensor:
    """Gives codes of an eager tensor, int8 or float8, as uint8."""
    if codes.dtype == tf.uint8:
        return codes
    if codes.dtype == tf.int8:
        return tf.bitcast(codes, tf.uint8)
    # TensorFlow has no view of a float8's bits.
    return tf.constant(np.asarray(codes).view(np.uint8))


def as_codes(bits: Tensor, dtype: str) -> Tensor:
    """Gives bits of an eager tensor as codes, int8 or float8."""
    if dtype == "int8":
        return tf.bitcast(bits, tf.int8)
    return tf.constant(bits.numpy().view(TF_DTYPES[dtype].as_numpy_dtype))
