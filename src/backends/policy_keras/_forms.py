"""How a Keras layer is a plain product of rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras import ops

from policy_core._forms import Arrange, Axes, as_they_are


@dataclass(frozen=True)
class Form:
    """How a layer is a product.

    Attributes:
        axes: The axes of its kernel.
        arrange: From its input to rows, and back.
        flat_bias: Whether its bias is one number for each of `out`, and is added by the kernel;
            any other is added afterwards.
    """

    axes: Axes
    arrange: Arrange = as_they_are
    flat_bias: bool = True


def patches(
    kernel_size: tuple[int, ...],
    strides: tuple[int, ...],
    padding: str,
    dilation: tuple[int, ...],
    channels_first: bool,
) -> Arrange:
    """Gives the arrangement of a convolution.

    The rows are the patches under the kernel, each flattened as (kernel axes, channels).

    Args:
        kernel_size: One size for each spatial axis, as strides and dilation.
        strides: Steps between patches.
        padding: `"same"`, `"valid"` or `"causal"`.
        dilation: Steps between a patch's elements.
        channels_first: Whether inputs and outputs have their channels before the spatial axes.
    """
    n = len(kernel_size)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True))
    taps: list[tuple[int, ...]] = [()]
    for k, d in zip(kernel_size, dilation, strict=True):
        taps = [(*tap, i * d) for tap in taps for i in range(k)]
    to_last, to_first = (0, *range(2, n + 2), 1), (0, n + 1, *range(1, n + 1))

    def arrange(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        x = ops.transpose(x, to_last) if channels_first else x
        if padding != "valid" and max(reach) > 1:
            # Sizes are numbers, or tensors where a graph does not know them.
            sizes = zip(ops.shape(x)[1:-1], reach, strides, strict=True)
            x = ops.pad(x, [(0, 0), *(_pads(padding, *each) for each in sizes), (0, 0)])
        parts = []
        for tap in taps:
            # Up to as far from the end as the patch reaches: no size need be known.
            index = tuple(
                slice(start, (start - r + 1) or None, step)
                for start, r, step in zip(tap, reach, strides, strict=True)
            )
            parts.append(x[(slice(None), *index, slice(None))])
        rows = ops.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return rows, lambda y: ops.transpose(y, to_first) if channels_first else y

    return arrange


def _pads(padding: str, size: Any, reach: int, stride: int) -> tuple[Any, Any]:
    """Gives what `"causal"` or `"same"` adds before and after; the latter for ceil(size / stride)."""
    if padding == "causal":
        return reach - 1, 0
    total = reach - 1
    if stride > 1:
        total -= (size - 1) % stride
        total = ops.maximum(total, 0) if ops.is_tensor(total) else max(total, 0)
    return total // 2, total - total // 2
