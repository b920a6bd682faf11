"""Packed weights: the layout, and its inverse."""

import copy
import ctypes
import pickle

import ml_dtypes
import numpy as np
import pytest

import policy_kernels as pk
from policy_kernels._loader import check, library

SIZES_N = [0, 1, 15, 16, 17, 31, 32, 33, 100]
SIZES_K = [0, 1, 3, 4, 5, 63, 64, 65, 127, 1000]


@pytest.mark.parametrize("k", SIZES_K)
@pytest.mark.parametrize("n", SIZES_N)
def test_unpack_is_the_inverse_of_pack(n, k):
    """Every code comes back, at every size, of int8 and of both float8 formats."""
    rng = np.random.default_rng(n * 101 + k)
    bits = rng.integers(0, 256, (n, k), np.uint8)
    for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        codes = bits.view(np.int8) if dtype == "int8" else bits
        weight = pk.pack(codes, dtype)
        assert (weight.n, weight.k, weight.dtype) == (n, k, dtype)
        unpacked = weight.unpack()
        assert unpacked.dtype == codes.dtype
        np.testing.assert_array_equal(unpacked, codes)


def test_the_layout_is_the_documented_one():
    """Panels of [k / 64][2][16 k4][16 n][4 k], padded with zeros, after a header and sums."""
    n, k = 70, 130
    codes = np.random.default_rng(0).integers(-127, 128, (n, k), np.int8)
    weight = pk.pack(codes)
    padded = np.zeros((96, 192), np.int8)
    padded[:n, :k] = codes
    expected = padded.reshape(3, 2, 16, 3, 16, 4).transpose(0, 3, 1, 4, 2, 5)
    start = -weight._pointer % 64
    panels = weight._memory[start : start + 3 * (64 + 128 + 32 * 192)].reshape(3, -1)
    sums = np.ascontiguousarray(panels[:, 64 : 64 + 128]).view(np.int32)
    np.testing.assert_array_equal(sums.reshape(-1), padded.sum(1, dtype=np.int32) * 128)
    blocks = np.ascontiguousarray(panels[:, 64 + 128 :]).view(np.int8)
    np.testing.assert_array_equal(blocks.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("code", [0, 2])
def test_panels_in_a_row_are_a_packed_weight(code):
    """Any panels multiply as the channels that they hold; other numbers of channels are refused."""
    n, k = 100, 70
    codes = np.random.default_rng(0).integers(-127, 128, (n, k), np.int8)
    weight = pk.pack(
        codes if code == 2 else codes.view(np.uint8), ("float8_e4m3fn", "", "int8")[code]
    )
    size = ctypes.c_int64()
    check(library().pk_packed_bytes(64, k, ctypes.addressof(size)))
    two = size.value
    check(library().pk_packed_bytes(32, k, ctypes.addressof(size)))
    panel = two - size.value
    for first, channels in ((0, 32), (32, 64), (64, 36), (96, 4)):
        out = np.empty((channels, k), np.int8)
        start = weight._pointer + -weight._pointer % 64 + first // 32 * panel
        check(library().pk_unpack(code, channels, k, start, out.ctypes.data, k))
        np.testing.assert_array_equal(out, codes[first : first + channels])
        for wrong in (channels - 1, channels + 1, channels + 32):
            if wrong % 32 == 0 and first + wrong <= n:
                continue
            with pytest.raises(ValueError, match="to be packed from"):
                check(library().pk_unpack(code, wrong, k, start, out.ctypes.data, k))


def test_any_strides_pack_alike():
    """Slices, transposes and reversed arrays are read where they lie, or copied."""
    base = np.random.default_rng(1).integers(-127, 128, (90, 90), np.int8)
    for codes in (base[:40, 3:80], base[::2, ::3], base.T, base[::-1, ::-1], base[:1, 5:6]):
        np.testing.assert_array_equal(pk.pack(codes).unpack(), codes)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_arrays_pack_as_what_they_are(dtype):
    """Arrays of ml_dtypes need no name; their bits come back."""
    codes = np.linspace(-3, 3, 35).reshape(5, 7).astype(dtype)
    weight = pk.pack(codes)
    assert weight.dtype == np.dtype(dtype).name
    np.testing.assert_array_equal(weight.unpack(), codes.view(np.uint8))


def test_copies_and_pickles_keep_the_codes():
    """They go through the plain codes; a shallow copy of an immutable object is the object."""
    codes = np.random.default_rng(2).integers(-127, 128, (33, 65), np.int8)
    weight = pk.pack(codes)
    assert copy.copy(weight) is weight
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert other is not weight
        assert (other.n, other.k, other.dtype) == (33, 65, "int8")
        np.testing.assert_array_equal(other.unpack(), codes)


def test_a_packed_weight_tells_its_memory():
    """nbytes counts padding, sums, headers and the room for alignment; repr shows it."""
    weight = pk.pack(np.ones((33, 65), np.int8))
    assert weight.nbytes == 64 * 128 + 64 * 4 + 2 * 64 + 63
    assert repr(weight) == f"PackedWeight(int8, n=33, k=65, nbytes={weight.nbytes})"


def test_the_plain_codes_may_go():
    """A packed weight keeps nothing of the array that it was made from."""
    codes = np.ones((2, 3), np.int8)
    weight = pk.pack(codes)
    codes[:] = 5
    assert (weight.unpack() == 1).all()
