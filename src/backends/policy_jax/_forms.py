"""How inputs of a JAX layer become rows of a plain product, and its rows the output."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from policy_core._forms import Arrange, Equation

from ._ops import Array


def stacked(shape: tuple[int, ...], ndim: int) -> str:
    """Says why a weight of a shape is none of one layer's, which has `ndim` axes; `""` if it is."""
    if len(shape) == ndim:
        return ""
    return (
        f"its weight has shape {shape}, not {ndim} axes: layers that vmap or scan stacked are "
        "wrapped one by one, then stacked"
    )


def general(axes: tuple[int, ...], out_shape: tuple[int, ...]) -> Arrange:
    """Gives the arrangement of a layer that contracts some axes and appends others.

    Args:
        axes: The contracted axes of the input, in the order of the weight's.
        out_shape: The shape of the appended axes.
    """

    def arrange(x: Array) -> tuple[Array, Callable[[Array], Array]]:
        inside = tuple(sorted(axis % x.ndim for axis in axes))
        kept = tuple(axis for axis in range(x.ndim) if axis not in inside)
        batch = tuple(x.shape[axis] for axis in kept)
        rows = x if len(inside) == 1 and inside[0] == x.ndim - 1 else x.transpose((*kept, *inside))
        rows = rows.reshape((*batch, math.prod(x.shape[axis] for axis in inside)))
        return rows, lambda y: y.reshape((*batch, *out_shape))

    return arrange


def equation(text: str) -> Equation:
    """Reads an einsum of an input and a weight.

    Raises:
        ValueError: It is no plain product, or its output has the weight's axes in another order.
    """
    made = Equation.parse(text)
    if made.axes.out != tuple(sorted(made.axes.out)):
        raise ValueError(f"{text!r} reorders the weight's axes in its output")
    return made


def patches(
    kernel_size: tuple[int, ...],
    strides: tuple[int, ...],
    padding: str | tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> Arrange:
    """Gives the arrangement of a convolution over (..., spatial axes, channels).

    The rows are the patches under the kernel, each flattened as (kernel axes, channels).

    Args:
        kernel_size: One size for each spatial axis, as all other arguments.
        strides: Steps between patches.
        padding: `"SAME"`, `"VALID"`, or (before, after) for each axis.
        dilation: Steps between a patch's elements.
    """
    n = len(kernel_size)

    def arrange(x: Array) -> tuple[Array, Callable[[Array], Array]]:
        batch, spatial, channels = x.shape[: -n - 1], x.shape[-n - 1 : -1], x.shape[-1]
        reach = tuple((k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True))
        pads = (
            jax.lax.padtype_to_pads(spatial, reach, strides, padding)
            if isinstance(padding, str)
            else padding
        )
        x = jnp.pad(x, [(0, 0)] * len(batch) + [tuple(pad) for pad in pads] + [(0, 0)])
        sizes = tuple(
            (size + sum(pad) - r) // s + 1
            for size, pad, r, s in zip(spatial, pads, reach, strides, strict=True)
        )
        taps: list[tuple[int, ...]] = [()]
        for k in kernel_size:
            taps = [(*tap, i) for tap in taps for i in range(k)]
        parts = []
        for tap in taps:
            starts = [i * d for i, d in zip(tap, dilation, strict=True)]
            index = tuple(
                slice(start, start + (size - 1) * s + 1, s)
                for start, size, s in zip(starts, sizes, strides, strict=True)
            )
            parts.append(x[(..., *index, slice(None))])
        rows = jnp.stack(parts, axis=-2).reshape((*batch, *sizes, len(taps) * channels))
        return rows, lambda y: y

    return arrange
