"""Checks of array arguments, and their way to pointers and strides."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMATS = {"float8_e4m3fn": 0, "float8_e5m2": 1}

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
INT8: np.dtype[Any] = np.dtype(np.int8)
UINT8: np.dtype[Any] = np.dtype(np.uint8)


class Matrix(NamedTuple):
    """A 2-D array as the native side takes it.

    Attributes:
        array: keeps the memory alive while the pointer is in use.
        pointer: address of the first element.
        stride: distance from row to row, in elements.
    """

    array: NDArray[Any]
    pointer: int
    stride: int


def describe(value: object) -> str:
    """A short text for an error message: dtype and shape of an array, repr of anything else."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array of shape {value.shape}"
    return repr(value)


def format_number(name: str, value: object) -> int:
    """The native number of a float8 format.

    Raises:
        ValueError: there is no such format.
    """
    number = FORMATS.get(value) if isinstance(value, str) else None
    if number is None:
        raise ValueError(f"expected {name} to be one of {', '.join(FORMATS)}, got {value!r}")
    return number


def _checked(name: str, value: object, dtype: np.dtype[Any], shape: str) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise TypeError(
            f"expected {name} to be a {dtype} numpy array of shape {shape}, got {describe(value)}"
        )
    return value


def matrix(
    name: str, value: object, dtype: np.dtype[Any], shape: str, columns: int | None = None
) -> Matrix:
    """A 2-D array with contiguous rows, copied only where its memory is laid out otherwise.

    Args:
        name: the argument's name, for messages.
        value: the argument.
        dtype: the dtype it must have.
        shape: the shape it must have, in words, for messages.
        columns: the number of columns it must have; None for any.

    Raises:
        TypeError: it is no numpy array of that dtype.
        ValueError: its shape is another one.
    """
    array = _checked(name, value, dtype, shape)
    if array.ndim != 2 or columns not in (None, array.shape[1]):
        wanted = (
            shape if columns is None else f"{shape} with {shape[1:-1].split(', ')[1]}={columns}"
        )
        raise ValueError(f"expected {name} to have shape {wanted}, got {array.shape!r}")
    row_count, column_count = array.shape
    row_bytes, element_bytes = array.strides
    size = array.itemsize
    usable = (
        (column_count <= 1 or element_bytes == size)
        and (row_count <= 1 or (row_bytes >= column_count * size and row_bytes % size == 0))
        and array.flags.aligned
    )
    if not usable:
        array = np.array(array, order="C")
        row_bytes = array.strides[0]
    stride = row_bytes // size if row_count > 1 else column_count
    return Matrix(array, array.ctypes.data, max(stride, column_count))


def flat(name: str, value: object, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of any shape in C order, copied only where its memory is laid out otherwise.

    Raises:
        TypeError: it is no numpy array of that dtype.
    """
    array = _checked(name, value, dtype, "any")
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, order="C")


def vector(name: str, value: object, length: int) -> NDArray[Any]:
    """A contiguous float32 array of shape (length,).

    Raises:
        TypeError: it is no float32 numpy array.
        ValueError: its shape is another one.
    """
    array = _checked(name, value, FLOAT32, f"({length},)")
    if array.shape != (length,):
        raise ValueError(f"expected {name} to have shape {(length,)!r}, got {array.shape!r}")
    return flat(name, array, FLOAT32)


def scales(name: str, value: object, length: int) -> tuple[NDArray[Any], int]:
    """Scales of one per row, or one for all, with the stride that says which.

    Args:
        name: the argument's name, for messages.
        value: float32 array of shape (length,) or (), or a Python or numpy float.
        length: the number of rows.

    Returns:
        The scales, and 1 (one per row) or 0 (one for all).

    Raises:
        TypeError: it is neither a float nor a float32 numpy array.
        ValueError: its shape is another one.
    """
    if isinstance(value, float | np.float32):
        return np.array(value, np.float32), 0
    array = _checked(name, value, FLOAT32, f"({length},) or ()")
    if array.ndim == 0:
        return flat(name, array, FLOAT32), 0
    return vector(name, array, length), 1
