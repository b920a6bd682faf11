"""How a Keras layer is a plain product of rows: which axes, and the way there and back.

The weight of every linear layer is (out, in) in files, in plans and for the kernels. A `Form` says
which axes of Keras's kernel make up each of the two, and how an input of the layer becomes rows
over `in`, and rows over `out` its output.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras import ops

Arrange = Callable[[Any], tuple[Any, Callable[[Any], Any]]]
"""From an input to its rows of shape (..., in), and a function from (..., out) to the output."""


@dataclass(frozen=True)
class Axes:
    """The axes of a Keras kernel that make up the two of (out, in).

    Attributes:
        out: Axes that the output has, in its order.
        contracted: Axes that are summed over, in the order of the input's.
    """

    out: tuple[int, ...]
    contracted: tuple[int, ...]

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Gives the shape (out, in) for a kernel's shape."""
        return (
            math.prod(shape[axis] for axis in self.out),
            math.prod(shape[axis] for axis in self.contracted),
        )

    def to_file(self, kernel: Any) -> Any:
        """Gives a kernel as (out, in)."""
        order = (*self.out, *self.contracted)
        shape = tuple(kernel.shape)
        if order != tuple(range(len(shape))):
            kernel = ops.transpose(kernel, order)
        return kernel if len(shape) == 2 else ops.reshape(kernel, self.file_shape(shape))

    def from_file(self, weight: Any, shape: tuple[int, ...]) -> Any:
        """Gives an (out, in) weight in a kernel's shape."""
        order = (*self.out, *self.contracted)
        if len(shape) != 2:
            weight = ops.reshape(weight, tuple(shape[axis] for axis in order))
        if order == tuple(range(len(shape))):
            return weight
        return ops.transpose(weight, tuple(order.index(axis) for axis in range(len(shape))))


OUT_IN = Axes((0,), (1,))
IN_OUT = Axes((1,), (0,))


def as_they_are(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The arrangement of a layer that contracts the last axis."""
    return x, lambda y: y


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


@dataclass(frozen=True)
class Equation:
    """An einsum of an input and a kernel that is a plain product: no batch axes in the kernel.

    Attributes:
        lhs: Axis letters of the input, `.` for the ellipsis.
        rhs: Axis letters of the kernel.
        out: Axis letters of the output.
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def parse(cls, text: str) -> "Equation":
        """Reads an equation.

        Raises:
            ValueError: It is no plain product; the message says why.
        """
        compact = text.replace(" ", "")
        inputs, _, out = compact.partition("->")
        lhs, _, rhs = inputs.partition(",")
        made = cls(lhs.replace("...", "."), rhs, out.replace("...", "."))
        letters = made.lhs.replace(".", "") + made.out.replace(".", "")
        if not rhs.isalpha() or not made.lhs or not out or not letters.isalpha():
            raise ValueError(f"{text!r} is no product of an input and a kernel")
        if any(len(set(part)) != len(part) for part in (made.lhs, rhs, made.out)):
            raise ValueError(f"{text!r} takes a diagonal")
        if any(letter in made.lhs and letter in made.out for letter in rhs):
            raise ValueError(f"{text!r} has a batch axis in its kernel")
        if any(letter not in made.lhs and letter not in made.out for letter in rhs):
            raise ValueError(f"{text!r} sums an axis of the kernel alone")
        if any(letter not in rhs and letter not in made.out for letter in made.lhs):
            raise ValueError(f"{text!r} sums an axis of the input alone")
        return made

    @property
    def axes(self) -> Axes:
        """The axes of the kernel."""
        return Axes(
            tuple(self.rhs.index(letter) for letter in self.out if letter in self.rhs),
            tuple(i for i, letter in enumerate(self.rhs) if letter not in self.out),
        )

    def arrange(self, out_shape: tuple[int, ...]) -> Arrange:
        """Gives the arrangement, for the shape of the kernel's axes that the output has."""
        contracted = [letter for letter in self.rhs if letter not in self.out]
        appended = [letter for letter in self.out if letter in self.rhs]

        def arrange(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            dots = [f"\0{i}" for i in range(len(x.shape) - len(self.lhs.replace(".", "")))]
            lhs = [a for letter in self.lhs for a in (dots if letter == "." else [letter])]
            out = [a for letter in self.out for a in (dots if letter == "." else [letter])]
            kept = [letter for letter in lhs if letter not in contracted]
            rows = _transposed(x, [lhs.index(a) for a in (*kept, *contracted)])
            batch = tuple(ops.shape(rows)[: len(kept)])
            if len(contracted) != 1:
                rows = ops.reshape(rows, (*batch, math.prod(rows.shape[len(kept) :])))
            order = [(*kept, *appended).index(a) for a in out]

            def finish(y: Any) -> Any:
                if len(out_shape) != 1:
                    y = ops.reshape(y, (*batch, *out_shape))
                return _transposed(y, order)

            return rows, finish

        return arrange


def _transposed(x: Any, order: list[int]) -> Any:
    return x if order == list(range(len(order))) else ops.transpose(x, order)


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
        spatial = tuple(x.shape[1:-1])
        pads = [_pads(padding, *sizes) for sizes in zip(spatial, reach, strides, strict=True)]
        if any(pad != (0, 0) for pad in pads):
            x = ops.pad(x, [(0, 0), *pads, (0, 0)])
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


def _pads(padding: str, size: int | None, reach: int, stride: int) -> tuple[int, int]:
    if padding == "valid":
        return 0, 0
    if padding == "causal":
        return reach - 1, 0
    if stride == 1:
        total = reach - 1
    elif size is None:
        raise ValueError(
            "A quantized convolution with padding='same' and strides needs inputs of a known "
            "size. Give the Input a shape, or pad first and use padding='valid'."
        )
    else:
        total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2
