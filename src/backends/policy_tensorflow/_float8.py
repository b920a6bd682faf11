"""float8 training: products of codes, both made anew at each call, with their gradients."""

import tensorflow as tf

from policy_core import _scaling

from . import _native, _plain
from ._kernels import Kernel, kernel_here
from ._ops import OPS, Tensor, with_shape


def encode_f8(x: Tensor, scale: Tensor | None, codes: str, native: bool) -> tuple[Tensor, Tensor]:
    """Gives the float8 codes of a matrix under a scale, or under one per row, and the scales.

    Returns:
        Codes, as bits for the native kernels, else their float32 values; and scales of shape () or (m,).
    """
    if native and scale is not None:
        return _native.encode_f8(x, scale, codes), scale
    if native:
        return _native.quantize_rows_f8(x, codes)
    if scale is not None:
        return _plain.on_grid(x, scale, codes), scale
    column = _scaling.scale_of(OPS, OPS.amax(tf.cast(x, tf.float32), (1,)), codes)
    return _plain.on_grid(x, column, codes), column[:, 0]


def product_f8(
    left: Tensor,
    left_scale: Tensor,
    left_codes: str,
    right: Tensor,
    right_scale: Tensor,
    bias: Tensor | None,
    dtype: tf.DType,
    native: bool,
) -> Tensor:
    """Gives `(left * left_scale) @ (right * right_scale).T + bias` for codes of `encode_f8`.

    Args:
        left: Of shape (m, k).
        left_scale: float32 of shape () or (m,).
        left_codes: The float8 dtype of `left`.
        right: float8_e4m3fn of shape (n, k).
        right_scale: float32 of shape () or (n,).
        bias: Floats of shape (n,), or None.
        dtype: The dtype of the result.
        native: What `encode_f8` was told.
    """
    if native:
        channels = tf.broadcast_to(right_scale, tf.shape(right)[:1])
        return _native.linear(
            "linear_f8",
            left,
            right,
            channels,
            bias,
            codes="float8_e4m3fn",
            dtype=dtype,
            x_scale=left_scale,
            x_codes=left_codes,
        )
    total = _plain.product(left, right)
    rows_scale = left_scale if left_scale.shape.rank == 0 else left_scale[:, None]
    return tf.cast(_plain.scaled(total, rows_scale, right_scale, bias), dtype)


def product_f8_inner_scale(
    left: Tensor,
    left_scale: Tensor,
    left_codes: str,
    right: Tensor,
    right_scale: Tensor,
    dtype: tf.DType,
    native: bool,
) -> Tensor:
    """Gives `(left * left_scale * right_scale) @ right.T`: scales along the axis that is summed.

    No product of codes can take them out of its sum, so the left side is scaled first. Arguments as
    for `product_f8`, but `left_scale` () and `right_scale` (k,).
    """
    values = _plain.decode(left, left_codes) if native else left
    inside = tf.bfloat16 if dtype == tf.bfloat16 else tf.float32
    scaled = tf.cast(values * (left_scale * right_scale), inside)
    if native:
        ones = tf.ones(tf.shape(right)[:1], tf.float32)
        return _native.linear(
            "linear_f8w", scaled, right, ones, None, codes="float8_e4m3fn", dtype=dtype
        )
    return tf.cast(_plain.product(tf.cast(scaled, tf.float32), right), dtype)


def float8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    gradient_scale: object,
    dtype: tf.DType,
    kernel: Kernel | None = None,
) -> Tensor:
    """Gives the product of a float8 layer that keeps its float weight, with all gradients.

    Args:
        x: Floats of shape (..., k).
        weight: Floats of shape (n, k).
        bias: Floats of shape (n,), or None.
        x_scale: float32 of shape (), or None for a scale per row.
        weight_scale: float32 of shape (), or None for a scale per row.
        gradient_scale: A function that gives the scale of an output gradient, in backward.
        dtype: The dtype of the result.
        kernel: What computes; None for what `kernel_here` gives.
    """
    native = (kernel or kernel_here(getattr(x, "device", ""))) == "native"
    inputs = [x, weight] if bias is None else [x, weight, bias]
    inputs = [tf.convert_to_tensor(one) for one in inputs]

    @tf.custom_gradient
    def call(x: Tensor, weight: Tensor, *biases: Tensor) -> tuple[Tensor, object]:
        matrix = _plain.as_rows(x, weight.shape[1])
        left, left_scale = encode_f8(matrix, x_scale, "float8_e4m3fn", native)
        right, right_scale = encode_f8(weight, weight_scale, "float8_e4m3fn", native)
        added = biases[0] if biases else None
        y = product_f8(left, left_scale, "float8_e4m3fn", right, right_scale, added, dtype, native)

        def grad(dy: Tensor) -> list[Tensor]:
            dy = _plain.as_rows(dy, weight.shape[0])
            dbias = [tf.cast(tf.reduce_sum(tf.cast(dy, tf.float32), 0), b.dtype) for b in biases]
            scale = gradient_scale(dy)  # type: ignore[operator]
            g, _ = encode_f8(dy, scale, "float8_e5m2", native)
            dx = _backward(g, scale, tf.transpose(right), right_scale, dtype, native)
            dweight = _backward(
                tf.transpose(g), scale, tf.transpose(left), left_scale, dtype, native
            )
            dx = tf.cast(dx if x.shape.rank == 2 else tf.reshape(dx, tf.shape(x)), x.dtype)
            return [dx, tf.cast(dweight, weight.dtype), *dbias]

        if x.shape.rank != 2:
            y = tf.reshape(y, tf.concat([tf.shape(x)[:-1], tf.shape(weight)[:1]], 0))
        return y, grad

    y = call(*inputs)
    return with_shape(y, x.shape[:-1].concatenate(weight.shape[:1]))


def _backward(
    g: Tensor,
    g_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    dtype: tf.DType,
    native: bool,
) -> Tensor:
    if right_scale.shape.rank == 0:
        return product_f8(g, g_scale, "float8_e5m2", right, right_scale, None, dtype, native)
    return product_f8_inner_scale(g, g_scale, "float8_e5m2", right, right_scale, dtype, native)
