"""Rows of float32 to int8 codes and scales."""

import numpy as np
import pytest

import policy_kernels as pk

SIZES_M = [0, 1, 2, 8, 15, 16, 17, 33]
SIZES_K = [0, 1, 15, 63, 64, 65, 131072 + 5]


def reference(x):
    """The page on numerics, row by row in numpy float32."""
    codes = np.zeros(x.shape, np.int8)
    scale = np.empty(len(x), np.float32)
    for i, row in enumerate(x):
        if not np.isfinite(row).all():
            scale[i] = np.nan
            continue
        amax = np.max(np.abs(row), initial=np.float32(2.0**-100))
        scale[i] = amax / np.float32(127)
        inverse = np.float32(127) / amax
        codes[i] = np.clip(np.rint(row * inverse), -127, 127).astype(np.int8)
    return codes, scale


def assert_same(x):
    codes, scale = pk.quantize_rows_s8(x)
    expected_codes, expected_scale = reference(x)
    assert codes.dtype == np.int8
    assert scale.dtype == np.float32
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scale, expected_scale)


@pytest.mark.parametrize("k", SIZES_K)
@pytest.mark.parametrize("m", SIZES_M)
def test_codes_and_scales_equal_the_reference_to_the_bit(isa, m, k):
    """Codes and scales equal numpy's at every size, tails included."""
    rng = np.random.default_rng(m * 1000 + k)
    assert_same(rng.standard_normal((m, k), np.float32))


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-38, 1e-30, 1.0, 3.4e38])
def test_extreme_magnitudes_equal_the_reference(isa, amax):
    """Zeros, subnormals and the largest floats give finite positive scales and numpy's codes."""
    x = np.linspace(-amax, amax, 4 * 67).astype(np.float32).reshape(4, 67)
    assert_same(x)
    scale = pk.quantize_rows_s8(x)[1]
    assert (scale > 0).all()
    assert np.isfinite(scale).all()


def test_ties_round_to_even(isa):
    """A value half way between two codes gets the even one."""
    x = np.arange(-127, 127.5, 0.5, dtype=np.float32)[None]
    codes = pk.quantize_rows_s8(x)[0]
    np.testing.assert_array_equal(codes, np.rint(x).astype(np.int8))


@pytest.mark.parametrize(
    "value", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"]
)
@pytest.mark.parametrize("column", [0, 31, 66])
def test_a_row_that_is_not_finite_has_scale_nan_and_codes_zero(isa, value, column):
    """A NaN or infinity spoils its own row and no other."""
    x = np.ones((3, 67), np.float32)
    x[1, column] = value
    codes, scale = pk.quantize_rows_s8(x)
    assert np.isnan(scale).tolist() == [False, True, False]
    assert (codes[1] == 0).all()
    assert (codes[[0, 2]] == 127).all()


@pytest.mark.parametrize("seed", range(20))
def test_random_scales_of_rows_equal_the_reference(isa, seed):
    """Rows of magnitudes from 1e-37 to 1e37 equal numpy's, so no step is fused or reordered."""
    rng = np.random.default_rng(seed)
    magnitude = 10.0 ** rng.uniform(-37, 37, (64, 1))
    assert_same((rng.standard_normal((64, 129)) * magnitude).astype(np.float32))


def test_any_row_stride_gives_the_same_codes(isa):
    """Slices, transposes, reversed and repeated rows are read where they lie."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((40, 50), np.float32)
    for x in (base[:, 3:20], base[::2, :7], base.T, base[::-1], base[:, ::3], base[:, ::-1]):
        assert_same(x)
    assert_same(np.broadcast_to(base[0], (5, 50)))
    packed = np.zeros(4 * 33 + 1, np.uint8)[1:].view(np.float32).reshape(3, 11)
    packed[:] = base[:3, :11]
    assert not packed.flags.aligned
    assert_same(packed)
