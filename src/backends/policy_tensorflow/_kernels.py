"""How TensorFlow reaches a product with quantized weights, with its gradients.

On a CPU the native kernels run; where XLA compiles (`jit_compile=True`), on other devices, and
without native kernels TensorFlow's own operators do (`_plain`), under a name scope that says so.
"""

import functools
from typing import Literal

import tensorflow as tf

import policy_kernels
from policy_core import _scaling

from . import _native, _plain
from ._ops import OPS, Tensor, in_xla, with_shape

OPERATIONS = tuple(_native.OPERATIONS)

Kernel = Literal["native", "xla", "tensorflow"]
"""The native kernels, XLA's own dot, or TensorFlow's operators as they are."""

INSIDE_XLA = "under jit_compile=True XLA's own dot runs instead, and slower"


def kernel_table(device: str) -> tuple[tuple[str, str, str], ...]:
    """Gives for each operation the kernel that runs, and what to know about it, for a LayerSpec.

    Args:
        device: `"cpu"`, `"gpu"`, `"tpu"`, …
    """
    rows = [("float", "tensorflow", "")]
    native = device == "cpu" and _native.available()
    look_up = policy_kernels.kernel_name("dequantize_rows") if native else ""
    rows += [(name, look_up or f"{name}_tensorflow", "") for name in ("rows_s8", "rows_f8")]
    for operation in OPERATIONS:
        if native:
            name = policy_kernels.kernel_name(operation)
            slow = (
                "smaller, not faster: the scalar kernel runs; " if name.endswith("scalar") else ""
            )
            rows.append((operation, name, f"{slow}{INSIDE_XLA}"))
        elif device == "cpu":
            why = f"smaller, not faster: no native kernels ({_native.reason_against()})"
            rows.append((operation, f"{operation}_tensorflow", why))
        else:
            floats = "smaller, not faster: TensorFlow has no such product; decoded, as floats"
            rows.append((operation, f"{operation}_xla", "" if operation == "linear_s8" else floats))
    return tuple(rows)


def kernel_here(device: str = "") -> Kernel:
    """Gives what computes a product that is called or traced now.

    Args:
        device: TensorFlow's name of where the operands are; `""` where it gives none.
    """
    if in_xla():
        return "xla"
    kind = device_type(device) if device else _default_device()
    if kind != "cpu":
        return "xla"
    return "native" if _native.available() else "tensorflow"


def _default_device() -> str:
    others = [kind for kind in ("GPU", "TPU") if tf.config.list_logical_devices(kind)]
    return others[0].lower() if others else "cpu"


@functools.lru_cache
def device_type(device: str) -> str:
    """Gives `"cpu"`, `"gpu"`, …, of a device's name; a CPU where it has none."""
    parsed = tf.DeviceSpec.from_string(device).device_type
    return (parsed or "CPU").lower()


def linear(
    operation: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    codes: str,
    dtype: tf.DType,
    x_scale: Tensor | None = None,
    k: int | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Gives the product with a weight of which only codes are kept.

    Its gradient goes straight through the rounding of `x`; codes and scales have none.

    Args:
        operation: One of `OPERATIONS`.
        x: Floats of shape (..., k), of which a graph may know nothing.
        weight: uint8, packed by `_native.pack`, or the bits of codes of shape (n, k).
        scale: float32 of shape (n,).
        bias: Floats of shape (n,), or None.
        codes: The dtype of the weight's codes.
        dtype: The dtype of the result.
        x_scale: For linear_f8, float32 of shape (), or None for a scale per row.
        k: The size of the last axis, for a graph that does not know it of `x`; else None.
        kernel: What computes; None for what `kernel_here` gives.

    Returns:
        Floats of shape (..., n).
    """
    kernel = kernel or kernel_here(getattr(x, "device", ""))
    if x.dtype == tf.uint8:
        # Numbers here; the operators take bytes for codes.
        x = tf.cast(x, tf.float32)
    if kernel == "native":
        return _native.linear(
            operation, x, weight, scale, bias, codes=codes, dtype=dtype, x_scale=x_scale
        )
    product = _compiled_linear if kernel == "xla" and not in_xla() else _plain_linear
    with tf.name_scope(f"{operation}_{kernel}"):
        y = product(operation, _plain.as_rows(x, k), weight, scale, bias, codes, x_scale)
        if x.shape.rank != 2:
            y = tf.reshape(y, tf.concat([tf.shape(x)[:-1], tf.shape(scale)], 0))
        return tf.cast(with_shape(y, x.shape[:-1].concatenate(scale.shape)), dtype)


def plain_codes(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Gives the codes of shape (n, k) of a weight, packed or not, in TensorFlow's own operators."""
    if weight.shape.rank == 2:
        return weight
    return tf.ensure_shape(_plain.unpacked(weight, shape), shape)


def _plain_linear(
    operation: str,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    codes: str,
    x_scale: Tensor | None,
) -> Tensor:
    # What the function below closes over must not be a variable: custom_gradient would watch it.
    weight, scale = tf.convert_to_tensor(weight), tf.convert_to_tensor(scale)
    weight = plain_codes(weight, (scale.shape[0], x.shape[-1]))
    bias = None if bias is None else tf.convert_to_tensor(bias)

    @tf.custom_gradient
    def call(x: Tensor, *biases: Tensor) -> tuple[Tensor, object]:
        added = biases[0] if biases else None
        y = _plain.linear(operation, x, weight, scale, added, dtype=codes, x_scale=x_scale)

        def grad(dy: Tensor) -> list[Tensor]:
            values = _plain.decode(weight, codes) * scale[:, None]
            dx = tf.cast(tf.matmul(dy, values), x.dtype)
            return [dx, *(tf.cast(tf.reduce_sum(dy, 0), b.dtype) for b in biases)]

        return y, grad

    return call(x, *([] if bias is None else [bias]))


# On devices other than CPUs XLA compiles each product by itself, unless it compiles its caller.
_compiled_linear = tf.function(_plain_linear, jit_compile=True, autograph=False)


def rows(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    shape: tuple[int, ...],
    codes: str,
    dtype: tf.DType,
    kernel: Kernel | None = None,
) -> Tensor:
    """Gives the dequantized rows of a table of which only codes are kept.

    Args:
        ids: Integers of any shape, at least 0 and less than n.
        weight: uint8, packed, or the bits of codes of shape (n, k).
        scale: float32 of shape (n,).
        shape: (n, k).
        codes: The dtype of the codes.
        dtype: The dtype of the result.
        kernel: What computes; None for what `kernel_here` gives.
    """
    kernel = kernel or kernel_here(getattr(ids, "device", ""))
    if kernel == "native" and weight.shape.rank == 1:
        return _native.rows(ids, weight, shape, codes, scale, dtype)
    weight = plain_codes(weight, shape)
    found = _plain.decode(tf.gather(weight, ids), codes) * tf.gather(scale, ids)[..., None]
    return tf.cast(found, dtype)


# float8 training: products of codes, both made anew at each call.


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
