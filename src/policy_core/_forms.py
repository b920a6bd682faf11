"""How a framework's weight and input relate to a plain product of rows: axes, there and back.

The weight of every linear layer is (out, in) in files, in plans and for the kernels, whatever the
framework's own order. `Axes` says which axes of the framework's weight make up each of the two. An
`Arrange` says how an input of the layer becomes rows over `in`, and rows over `out` its output.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Arrange = Callable[[Any], tuple[Any, Callable[[Any], Any]]]
"""From an input to its rows of shape (..., in), and a function from (..., out) to the output."""


class Shapes(Protocol):
    """A framework's functions of shapes alone, as numpy has them."""

    def transpose(self, x: Any, axes: Any) -> Any:
        """Gives `x` with its axes in another order."""

    def reshape(self, x: Any, newshape: Any) -> Any:
        """Gives `x` in another shape."""

    def shape(self, x: Any) -> Any:
        """Gives the sizes of its axes, in a graph also those that it does not know."""


def as_they_are(x: Any) -> tuple[Any, Callable[[Any], Any]]:
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

    def to_file(self, shapes: Shapes, weight: Any) -> Any:
        """Gives a framework's weight as (out, in)."""
        shape = tuple(weight.shape)
        weight = transposed(shapes, weight, (*self.out, *self.contracted))
        return weight if len(shape) == 2 else shapes.reshape(weight, self.file_shape(shape))

    def from_file(self, shapes: Shapes, weight: Any, shape: tuple[int, ...]) -> Any:
        """Gives an (out, in) weight in a framework's shape."""
        order = (*self.out, *self.contracted)
        if len(shape) != 2:
            weight = shapes.reshape(weight, tuple(shape[axis] for axis in order))
        return transposed(shapes, weight, tuple(order.index(axis) for axis in range(len(shape))))


OUT_IN = Axes((0,), (1,))
IN_OUT = Axes((1,), (0,))


def transposed(shapes: Shapes, x: Any, order: tuple[int, ...]) -> Any:
    """Gives `x` with its axes in another order; itself where that is the one that they have."""
    return x if order == tuple(range(len(order))) else shapes.transpose(x, order)


@dataclass(frozen=True)
class Equation:
    """An einsum of an input and a weight that is a plain product: no batch axes in the weight.

    Attributes:
        lhs: Axis letters of the input, `.` for the ellipsis.
        rhs: Axis letters of the weight.
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
        inputs, _, out = text.replace(" ", "").partition("->")
        lhs, _, rhs = inputs.partition(",")
        made = cls(lhs.replace("...", "."), rhs, out.replace("...", "."))
        letters = made.lhs.replace(".", "") + made.out.replace(".", "")
        if not rhs.isalpha() or not made.lhs or not out or not letters.isalpha():
            raise ValueError(f"{text!r} is no product of an input and a weight")
        if any(len(set(part)) != len(part) for part in (made.lhs, rhs, made.out)):
            raise ValueError(f"{text!r} takes a diagonal")
        if any(letter in made.lhs and letter in made.out for letter in rhs):
            raise ValueError(f"{text!r} has a batch axis in its weight")
        if any(letter not in made.lhs and letter not in made.out for letter in rhs):
            raise ValueError(f"{text!r} sums an axis of the weight alone")
        if any(letter not in rhs and letter not in made.out for letter in made.lhs):
            raise ValueError(f"{text!r} sums an axis of the input alone")
        return made

    @property
    def axes(self) -> Axes:
        """The axes of the weight."""
        return Axes(
            tuple(self.rhs.index(letter) for letter in self.out if letter in self.rhs),
            tuple(i for i, letter in enumerate(self.rhs) if letter not in self.out),
        )

    def arrange(self, shapes: Shapes, out_shape: tuple[int, ...]) -> Arrange:
        """Gives the arrangement, for the shape of the weight's axes that the output has."""
        contracted = [letter for letter in self.rhs if letter not in self.out]
        appended = [letter for letter in self.out if letter in self.rhs]

        def arrange(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            dots = [f"\0{i}" for i in range(len(x.shape) - len(self.lhs.replace(".", "")))]
            lhs = [a for letter in self.lhs for a in (dots if letter == "." else [letter])]
            out = [a for letter in self.out for a in (dots if letter == "." else [letter])]
            kept = [letter for letter in lhs if letter not in contracted]
            rows = transposed(shapes, x, tuple(lhs.index(a) for a in (*kept, *contracted)))
            batch = tuple(shapes.shape(rows)[: len(kept)])
            if len(contracted) != 1:
                rows = shapes.reshape(rows, (*batch, math.prod(rows.shape[len(kept) :])))
            order = tuple((*kept, *appended).index(a) for a in out)

            def finish(y: Any) -> Any:
                if len(out_shape) != 1:
                    y = shapes.reshape(y, (*batch, *out_shape))
                return transposed(shapes, y, order)

            return rows, finish

        return arrange
