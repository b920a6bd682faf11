"""The part of the contract suite that concerns arrays: casts, codes, scales, products."""

from importlib import import_module
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from ._backend import Backend, backend, tensor_backend

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CODES = ("int8", *FLOAT8)


def oracle() -> Any:
    """Gives the reference backend's package, which all others are measured against."""
    return import_module("policy_numpy")


def as_numpy_dtype(name: str) -> "np.dtype[Any]":
    """Gives numpy's dtype of a canonical name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def bits(array: Any) -> "np.ndarray":
    """Gives an array's bytes, so that NaN equals NaN and -0 differs from 0."""
    flat: np.ndarray = np.asarray(array, order="C").reshape(-1)
    return flat.view(np.uint8)


def same_bits(left: Any, right: Any) -> bool:
    """Says whether two arrays have one dtype, one shape and the same bits."""
    left, right = np.asarray(left), np.asarray(right)
    alike = left.dtype == right.dtype and left.shape == right.shape
    return alike and bool((bits(left) == bits(right)).all())


def hard_arrays() -> "list[Any]":
    """Gives pytest parameters: float arrays on which quantizers are known to fail."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal((5, 33), np.float32)
    rows = normal * np.array([[1e-3], [1], [1000], [1e4], [0]], np.float32)
    tiny = np.array([[1e-40, 0], [1e-38, 1e-39], [1e-30, -1e-31], [0, 0]], np.float32)
    ties = np.array(
        [[0.5, 1.5, 2.5, -0.5, -1.5, 127], [-127, 126.5, 0.4999, 63.5, 64.5, 1]], np.float32
    )
    bad = normal.copy()
    bad[1, 3], bad[2, 0], bad[3, 32] = np.nan, np.inf, -np.inf
    cases = {
        "normal": normal,
        "rows-of-all-sizes": rows,
        "tiny": tiny,
        "ties": ties,
        "not-finite": bad,
        "zeros": np.zeros((3, 4), np.float32),
        "float16-small": np.array([[0, 0, 1e-4, 1e-4], [0, 0, 0, 0]], np.float16),
        "float16-large": np.array([[6e4, -6.5e4, 1, 0]], np.float16),
        "bfloat16": normal.astype(ml_dtypes.bfloat16),
        "no-rows": np.zeros((0, 4), np.float32),
        "no-columns": np.zeros((4, 0), np.float32),
        "one": np.array([[3.0]], np.float32),
    }
    return [pytest.param(array, id=name) for name, array in cases.items()]


class ArrayContract:
    """What every backend does to arrays. See `policy_core.testing`."""

    backend_name: ClassVar[str]

    @property
    def backend(self) -> Backend:
        """The backend under test."""
        return backend(self.backend_name)

    def tensor(self, array: Any) -> Any:
        """Gives a numpy array as a tensor of the backend."""
        return self.backend.from_numpy(np.asarray(array))

    def array(self, tensor: Any) -> Any:
        """Gives a tensor of the backend as a numpy array."""
        return self.backend.to_numpy(tensor)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *CODES, "int64", "bool"])
    def test_numpy_round_trip(self, dtype: str) -> None:
        """An array of any dtype becomes a tensor and comes back with the same bits."""
        array = np.arange(12).reshape(3, 4).astype(as_numpy_dtype(dtype))
        assert same_bits(self.array(self.tensor(array)), array)

    def test_tensors_are_known_by_type(self) -> None:
        """A tensor's type alone tells which backend it belongs to."""
        assert self.backend.is_tensor_type(type(self.tensor(np.ones(2, np.float32))))
        assert not self.backend.is_tensor_type(list)
        if self.backend_name != "numpy":
            kind = type(self.tensor(np.ones(2, np.float32)))
            assert tensor_backend(kind) is self.backend

    @pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
    def test_floats_are_cast(self, source: str, target: str) -> None:
        """A float tensor comes in the compute dtype, rounded to nearest even."""
        array = np.linspace(-3, 3, 50, dtype=np.float32).astype(as_numpy_dtype(source))
        result = self.array(self.backend.convert_input(self.tensor(array), target))
        assert same_bits(result, array.astype(as_numpy_dtype(target)))

    @pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "bool", *FLOAT8])
    def test_other_dtypes_pass(self, dtype: str) -> None:
        """Integers, booleans and float8 codes pass through a cast as they are."""
        tensor = self.tensor(np.ones(3).astype(as_numpy_dtype(dtype)))
        assert self.backend.convert_input(tensor, "bfloat16") is tensor

    def test_nothing_to_cast_copies_nothing(self) -> None:
        """A tensor that is in the compute dtype already is given back itself."""
        tensor = self.tensor(np.ones(3, np.float32))
        assert self.backend.convert_input(tensor, "float32") is tensor
        assert self.backend.convert_input(tensor, None) is tensor

    @pytest.mark.parametrize("dtype", CODES)
    @pytest.mark.parametrize("axes", [(1,), (0,), (0, 1)], ids=["rows", "columns", "tensor"])
    @pytest.mark.parametrize("array", hard_arrays())
    def test_quantize_is_the_reference_to_the_bit(
        self, array: Any, axes: tuple[int, ...], dtype: str
    ) -> None:
        """Codes and scales have the reference's bits."""
        codes, scale = self.backend.quantize(self.tensor(array), dtype, axes)
        wanted_codes, wanted_scale = oracle().quantize(array, dtype, axes)
        assert same_bits(self.array(scale), wanted_scale)
        assert same_bits(self.array(codes), wanted_codes)

    @pytest.mark.parametrize("dtype", CODES)
    @pytest.mark.parametrize("array", hard_arrays())
    def test_scales_are_positive_and_finite(self, array: Any, dtype: str) -> None:
        """A scale is positive and finite, or NaN for a block with a value that is not finite."""
        scale = self.array(self.backend.quantize(self.tensor(array), dtype, (1,))[1])
        finite = np.isfinite(array.astype(np.float32)).all(1, keepdims=True)
        assert np.isnan(scale[~finite]).all()
        assert (scale[finite] > 0).all()
        assert np.isfinite(scale[finite]).all()

    @pytest.mark.parametrize("dtype", FLOAT8)
    def test_decode_is_exact(self, dtype: str) -> None:
        """All 256 codes of a float8 format dequantize to exactly their values."""
        codes = np.arange(256, dtype=np.uint8).view(as_numpy_dtype(dtype))
        result = self.array(self.backend.dequantize(self.tensor(codes), self.tensor(np.float32(1))))
        wanted = codes.astype(np.float32)
        assert np.array_equal(result, wanted, equal_nan=True)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("codes_dtype", CODES)
    def test_dequantize_is_codes_times_scale(self, codes_dtype: str, dtype: str) -> None:
        """Dequantizing multiplies in float32 and rounds once to the dtype asked for."""
        array = np.random.default_rng(1).standard_normal((4, 9), np.float32)
        codes, scale = oracle().quantize(array, codes_dtype, (1,))
        result = self.backend.dequantize(self.tensor(codes), self.tensor(scale), dtype)
        wanted = (codes.astype(np.float32) * scale).astype(as_numpy_dtype(dtype))
        assert same_bits(self.array(result), wanted)
