"""Weights and inputs of any axes as the (out, in) and the rows of one plain product."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_core._forms import IN_OUT, OUT_IN, Axes, Equation, as_they_are

LETTERS = "abcdefg"


@st.composite
def products(draw):
    """Gives an equation, and sizes of its axes: rows, contracted and appended ones, all shuffled."""
    count = draw(st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 2)))
    rows, contracted, appended = "ab"[: count[0]], "cd"[: count[1]], "ef"[: count[2]]
    lhs, rhs, out = (
        "".join(draw(st.permutations(part)))
        for part in (rows + contracted, contracted + appended, rows + appended)
    )
    sizes = {letter: draw(st.integers(1, 4)) for letter in LETTERS}
    return f"{lhs},{rhs}->{out}", sizes


def filled(letters, sizes):
    shape = [sizes[letter] for letter in letters]
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape)


@given(products())
def test_equation(product):
    """Rows times an (out, in) weight, arranged, is what numpy's einsum gives."""
    text, sizes = product
    equation = Equation.parse(text)
    x, weight = filled(equation.lhs, sizes), filled(equation.rhs, sizes)
    rows, finish = equation.arrange(np, tuple(weight.shape[a] for a in equation.axes.out))(x)
    y = finish(rows @ equation.axes.to_file(np, weight).T)
    assert np.array_equal(y, np.einsum(text, x, weight))


@given(products())
def test_there_and_back(product):
    """A weight comes back from (out, in) as it was, and has the shape that was foretold."""
    text, sizes = product
    equation = Equation.parse(text)
    weight = filled(equation.rhs, sizes)
    plain = equation.axes.to_file(np, weight)
    assert plain.shape == equation.axes.file_shape(weight.shape)
    assert np.array_equal(equation.axes.from_file(np, plain, weight.shape), weight)


def test_ellipsis():
    """An ellipsis stands for any number of rows' axes, wherever the output has them."""
    equation = Equation.parse("...c, ec -> e...")
    weight = filled("ec", {"e": 3, "c": 4})
    for shape in ((4,), (2, 4), (2, 5, 4)):
        x = np.arange(np.prod(shape)).reshape(shape)
        rows, finish = equation.arrange(np, (3,))(x)
        assert np.array_equal(finish(rows @ weight.T), np.einsum("...c,ec->e...", x, weight))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ab->a", "no product"),
        ("ab,bc", "no product"),
        ("ab,b1->a1", "no product"),
        ("aab,bc->ac", "diagonal"),
        ("abc,bce->abe", "batch axis"),
        ("ab,bce->ac", "sums an axis of the weight alone"),
        ("abz,bc->ac", "sums an axis of the input alone"),
    ],
)
def test_no_product(text, reason):
    """An einsum that is no plain product is refused with the reason."""
    with pytest.raises(ValueError, match=reason):
        Equation.parse(text)


def test_nothing_to_do():
    """A weight that is (out, in) already, and rows that are rows, are not touched."""
    weight = np.ones((2, 3))
    assert OUT_IN.to_file(np, weight) is weight
    assert OUT_IN.from_file(np, weight, (2, 3)) is weight
    assert IN_OUT.to_file(np, weight).shape == (3, 2)
    assert Axes((2,), (0, 1)).file_shape((2, 3, 4)) == (4, 6)
    rows, finish = as_they_are(weight)
    assert rows is weight
    assert finish(weight) is weight
