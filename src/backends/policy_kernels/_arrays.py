"""Checks of array arguments, and their way to pointers and strides."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMATS = {"float8_e4m3fn": 0, "float8_e5m2": 1}
CODES = FORMATS | {"int8": 2}
FLOATS = ("float32", "bfloat16", "float16")

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
INT8: np.dtype[Any] = np.dtype(np.int8)
UINT8: np.dtype[Any] = np.dtype(np.uint8)


# The native numbers of the float dtypes; bfloat16 joins when one is met, as it is not numpy's own.
_float_numbers: dict[Any, int] = {np.dtype(np.float32): 0, np.dtype(np.float16): 2}


class Vector(NamedTuple):
    """An array of one value per row or channel, or one for all, as the native side takes it.

    Attributes:
        given: the argument that it came from.
        array: keeps the memory alive while the pointer is in use.
        pointer: address of the first element.
        stride: 1 for one per row, 0 for one for all.
        number: the native number of its dtype.
    """

    given: object
    array: NDArray[Any]
    pointer: int
    stride: int
    number: int


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


def float_number(dtype: object) -> int | None:
    """The native number of a float dtype; None for any other dtype."""
    number = _float_numbers.get(dtype)
    if number is None and isinstance(dtype, np.dtype) and dtype.name == "bfloat16":
        number = _float_numbers[dtype] = 1
    return number


def float_dtype(name: str, value: object) -> np.dtype[Any]:
    """A float dtype from its name or itself.

    Raises:
        ValueError: it is none that the kernels have.
    """
    if value == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    if isinstance(value, str) and value in FLOATS:
        return np.dtype(value)
    if isinstance(value, np.dtype) and float_number(value) is not None:
        return value
    raise ValueError(f"expected {name} to be one of {', '.join(FLOATS)}, got {value!r}")


def floats(name: str, value: object, shape: str, columns: int) -> tuple[Matrix, int]:
    """A 2-D float array as `matrix` gives it, and the native number of its dtype.

    Raises:
        TypeError: it is no numpy array of a float dtype that the kernels have.
        ValueError: its shape is another one.
    """
    number = float_number(value.dtype) if isinstance(value, np.ndarray) else None
    if number is None:
        raise TypeError(
            f"expected {name} to be a {' or '.join(FLOATS)} numpy array of shape {shape}, "
            f"got {describe(value)}"
        )
    assert isinstance(value, np.ndarray)
    flags = value.flags
    if value.ndim == 2 and value.shape[1] == columns and flags.c_contiguous and flags.aligned:
        return Matrix(value, value.ctypes.data, columns), number
    return matrix(name, value, value.dtype, shape, columns), number


def bias_vector(name: str, value: object, length: int) -> Vector:
    """A bias of any float dtype and of shape (length,).

    Raises:
        TypeError: it is no numpy array of a float dtype that the kernels have.
        ValueError: its shape is another one.
    """
    number = float_number(value.dtype) if isinstance(value, np.ndarray) else None
    if number is None:
        raise TypeError(
            f"expected {name} to be a {' or '.join(FLOATS)} numpy array of shape ({length},), "
            f"got {describe(value)}"
        )
    assert isinstance(value, np.ndarray)
    if value.shape != (length,):
        raise ValueError(f"expected {name} to have shape {(length,)!r}, got {value.shape!r}")
    array = flat(name, value, value.dtype)
    return Vector(value, array, array.ctypes.data, 1, number)


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


def scales(name: str, value: object, length: int, *, for_all: bool) -> Vector:
    """Scales of one per row, or one for all, with the stride that says which.

    Args:
        name: the argument's name, for messages.
        value: float32 array of shape (length,); where `for_all`, also of shape (), or a Python or
            numpy float.
        length: the number of rows.
        for_all: whether one scale for all will do.

    Raises:
        TypeError: it is neither a float nor a float32 numpy array.
        ValueError: its shape is another one.
    """
    if for_all and isinstance(value, float | np.float32):
        one = np.array(value, np.float32)
        return Vector(value, one, one.ctypes.data, 0, 0)
    array = _checked(name, value, FLOAT32, f"({length},) or ()" if for_all else f"({length},)")
    if for_all and array.ndim == 0:
        array, stride = flat(name, array, FLOAT32), 0
    else:
        array, stride = vector(name, array, length), 1
    return Vector(value, array, array.ctypes.data, stride, 0)
