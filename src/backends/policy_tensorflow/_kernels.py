"""How TensorFlow reaches a product with quantized weights, with its gradients.

On a CPU the native kernels run; where XLA compiles (`jit_compile=True`), on other devices, and
without native kernels TensorFlow's own operators do (`_plain`), under a name scope that says so.
"""

import functools
from typing import Literal

import tensorflow as tf

import policy_kernels

from . import _native, _plain
from ._ops import Tensor, in_xla, with_shape

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
