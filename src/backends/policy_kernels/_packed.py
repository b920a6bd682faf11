"""Weights in the layout that the kernels read."""

import ctypes
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ._arrays import CODES, Vector, describe, matrix
from ._loader import check, library


class PackedWeight:
    """A weight's codes, packed: what every product multiplies by.

    Immutable. Copies and pickles go through the plain codes, as the packed form depends on its
    address.

    Attributes:
        dtype: ``"int8"``, ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        n: the number of output channels.
        k: the number of elements that a product sums.
        nbytes: the memory it takes, padding included: n is rounded up to 32 and k to 64.
    """

    __slots__ = ("__weakref__", "_code", "_memory", "_pointer", "_vectors", "dtype", "k", "n")

    def __init__(self, codes: NDArray[Any], dtype: str | None = None) -> None:
        """Pack codes.

        Args:
            codes: int8, uint8 (the bits of float8 codes) or a float8 dtype, of shape (n, k), with any
                strides.
            dtype: what uint8 codes are; None or the dtype of `codes` for others.

        Raises:
            TypeError: codes is no array of such a dtype, or `dtype` contradicts it.
            ValueError: codes is not 2-D, or `dtype` is unknown.
            MemoryError: there is no memory for the packed form.
            KernelsUnavailableError: the library was not built.
        """
        self.dtype = _dtype_of(codes, dtype)
        self._code = CODES[self.dtype]
        bits = codes if codes.dtype == np.int8 else codes.view(np.uint8)
        rows = matrix("codes", bits, bits.dtype, "(n, k)")
        self.n, self.k = rows.array.shape
        native = library()
        size = ctypes.c_int64()
        check(native.pk_packed_bytes(self.n, self.k, ctypes.addressof(size)))
        self._memory = np.empty(size.value, np.uint8)
        self._pointer: int = self._memory.ctypes.data
        check(native.pk_pack(self._code, self.n, self.k, rows.pointer, rows.stride, self._pointer))
        self._vectors: dict[str, Vector] = {}

    @property
    def nbytes(self) -> int:
        """The memory it takes, in bytes."""
        return self._memory.nbytes

    def unpack(self) -> NDArray[Any]:
        """The codes that were packed: int8, or uint8 for float8 codes, of shape (n, k)."""
        codes = np.empty((self.n, self.k), np.int8 if self.dtype == "int8" else np.uint8)
        check(
            library().pk_unpack(
                self._code, self.n, self.k, self._pointer, codes.ctypes.data, self.k
            )
        )
        return codes

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.unpack(), self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.unpack(), self.dtype)

    def __repr__(self) -> str:
        return f"PackedWeight({self.dtype}, n={self.n}, k={self.k}, nbytes={self.nbytes})"


def pack(codes: NDArray[Any], dtype: str | None = None) -> PackedWeight:
    """Codes in the layout that the kernels read; arguments as for ``PackedWeight``."""
    return PackedWeight(codes, dtype)


def _dtype_of(codes: object, dtype: str | None) -> str:
    if dtype is not None and dtype not in CODES:
        raise ValueError(f"expected dtype to be one of {', '.join(CODES)}, got {dtype!r}")
    if isinstance(codes, np.ndarray):
        if codes.dtype == np.uint8 and dtype not in (None, "int8"):
            return str(dtype)
        name: str = codes.dtype.name
        if name in CODES and codes.dtype.itemsize == 1 and dtype in (None, name):
            return name
    wanted = "int8, uint8 with dtype=..., or float8" if dtype is None else f"{dtype} or uint8"
    if dtype == "int8":
        wanted = "int8"
    raise TypeError(
        f"expected codes to be a numpy array of {wanted} and of shape (n, k), got {describe(codes)}"
    )
