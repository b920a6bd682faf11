"""How tensors of a framework's layer relate to a plain product of rows: axes there and back.

The weight of every linear layer is (out, in) in files, in plans and for the kernels, whatever the
framework's own order. A `Form` says which axes of the framework's weight make up each of the two,
and how an input of the layer becomes rows over `in`, and rows over `out` its output.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ._ops import Array

Arrange = Callable[[Array], tuple[Array, Callable[[Array], Array]]]
"""From an input to its rows of shape (..., in), and a function from (..., out) to the output."""


def as_they_are(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The arrangement of a layer that contracts the last axis."""
    return x, lambda y: y


@dataclass(frozen=True)
class Axes:
    """The axes of a framework's weight that make up the two of (out, in).

    Attributes:
        out: Axes that the output has, in its order.
        contracted: Axes that are summed over, in the order of the input's.
    """

    out: tuple[int, ...]
    contracted: tuple[int, ...]

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Gives the shape (out, in) for a framework's shape."""
        return (
            math.prod(shape[axis] for axis in self.out),
            math.prod(shape[axis] for axis in self.contracted),
        )

    def to_file(self, weight: Array) -> Array:
        """Gives a framework's weight as (out, in)."""
        order = (*self.out, *self.contracted)
        if order != tuple(range(weight.ndim)):
            weight = weight.transpose(order)
        return weight.reshape(
            math.prod(weight.shape[: len(self.out)]), math.prod(weight.shape[len(self.out) :])
        )

    def from_file(self, weight: Array, shape: tuple[int, ...]) -> Array:
        """Gives an (out, in) weight in a framework's shape."""
        order = (*self.out, *self.contracted)
        weight = weight.reshape(tuple(shape[axis] for axis in order))
        return weight.transpose(tuple(order.index(axis) for axis in range(len(shape))))


OUT_IN = Axes((0,), (1,))
IN_OUT = Axes((1,), (0,))


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


@dataclass(frozen=True)
class Equation:
    """An einsum of an input and a weight that is a plain product: no batch axes in the weight.

    Attributes:
        text: `"lhs,rhs->out"`, without spaces.
        lhs: Axis letters of the input, `.` for the ellipsis.
        rhs: Axis letters of the weight.
        out: Axis letters of the output.
    """

    text: str
    lhs: str
    rhs: str
    out: str

    @classmethod
    def parse(cls, text: str) -> "Equation":
        """Reads an equation.

        Raises:
            ValueError: It is no plain product; the message says why.
        """
        text = text.replace(" ", "")
        inputs, _, out = text.partition("->")
        lhs, _, rhs = inputs.partition(",")
        lhs, out = lhs.replace("...", "."), out.replace("...", ".")
        made = cls(text, lhs, rhs, out)
        if not rhs.isalpha() or not lhs or len(set(rhs)) != len(rhs):
            raise ValueError(f"{text!r} is no product of an input and a weight")
        if any(letter in lhs and letter in out for letter in rhs):
            raise ValueError(f"{text!r} has a batch axis in its weight")
        if any(letter not in lhs and letter not in out for letter in rhs):
            raise ValueError(f"{text!r} sums an axis of the weight alone")
        if any(letter not in rhs and letter not in out for letter in lhs):
            raise ValueError(f"{text!r} sums an axis of the input alone")
        if [x for x in out if x in rhs] != [x for x in rhs if x in out]:
            raise ValueError(f"{text!r} reorders the weight's axes in its output")
        return made

    @property
    def axes(self) -> Axes:
        """The axes of the weight."""
        return Axes(
            tuple(i for i, letter in enumerate(self.rhs) if letter in self.out),
            tuple(i for i, letter in enumerate(self.rhs) if letter not in self.out),
        )

    def arrange(self, out_shape: tuple[int, ...]) -> Arrange:
        """Gives the arrangement, for the shape of the weight's axes that the output has."""

        def arrange(x: Array) -> tuple[Array, Callable[[Array], Array]]:
            dots = [f"\0{i}" for i in range(x.ndim - len(self.lhs.replace(".", "")))]
            lhs = [a for letter in self.lhs for a in (dots if letter == "." else [letter])]
            out = [a for letter in self.out for a in (dots if letter == "." else [letter])]
            contracted = [letter for letter in self.rhs if letter not in self.out]
            kept = [letter for letter in lhs if letter not in contracted]
            appended = [letter for letter in self.rhs if letter in self.out]
            rows = x.transpose([lhs.index(a) for a in (*kept, *contracted)])
            batch = rows.shape[: len(kept)]
            rows = rows.reshape((*batch, math.prod(rows.shape[len(kept) :])))
            order = [(*kept, *appended).index(a) for a in out]
            return rows, lambda y: y.reshape((*batch, *out_shape)).transpose(order)

        return arrange


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
