"""float8 products against float64."""

import ml_dtypes
import numpy as np
import pytest

import policy_kernels as pk

DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
each_m = pytest.mark.parametrize("m", [0, 1, 2, 8, 15, 16, 17, 33])
each_k = pytest.mark.parametrize("k", [0, 1, 15, 63, 64, 65, 131072 + 5])
each_n = pytest.mark.parametrize("n", [1, 7, 31, 33])
each_format = pytest.mark.parametrize("format", DTYPES)


def finite_codes(rng, shape, format):
    """Random codes of all finite values of a format."""
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[np.isfinite(codes.view(DTYPES[format]).astype(np.float32))]
    return rng.choice(finite, shape)


def decoded(codes, format):
    return codes.view(DTYPES[format]).astype(np.float64)


def assert_within(y, x, w, bias):
    """Within 1e-6 of float64, scaled by sum |x| |w| + |bias|."""
    bias = np.zeros(len(w)) if bias is None else bias
    exact = x @ w.T + bias
    size = np.abs(x) @ np.abs(w).T + np.abs(bias)
    assert y.dtype == np.float32
    assert y.shape == exact.shape
    assert (np.abs(y - exact) <= 1e-6 * size).all()


@each_n
@each_k
@each_m
def test_linear_f8_is_within_1e_6_of_float64(isa, m, n, k):
    """Both formats, scales per row and per tensor, with and without bias, at every size."""
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    x_format, w_format = rng.choice(list(DTYPES), 2)
    x_codes = finite_codes(rng, (m, k), x_format)
    w_codes = finite_codes(rng, (n, k), w_format)
    x_scale = rng.uniform(1e-3, 1, m).astype(np.float32)
    w_scale = rng.uniform(1e-3, 1, n).astype(np.float32)
    bias = rng.standard_normal(n, np.float32)
    x, w = decoded(x_codes, x_format), decoded(w_codes, w_format)

    y = pk.linear_f8(x_codes, x_scale, x_format, w_codes, w_scale, w_format, bias)
    assert_within(y, x * x_scale[:, None], w * w_scale[:, None], bias)
    one = np.float32(0.37)
    y = pk.linear_f8(x_codes, one, x_format, w_codes, one, w_format)
    assert_within(y, x * float(one), w * float(one), None)


@each_n
@each_k
@each_m
def test_linear_f8w_is_within_1e_6_of_float64(isa, m, n, k):
    """float32 rows against float8 weights, scales per channel and per tensor, at every size."""
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    format = rng.choice(list(DTYPES))
    x = rng.standard_normal((m, k), np.float32)
    codes = finite_codes(rng, (n, k), format)
    scale = rng.uniform(1e-3, 1, n).astype(np.float32)
    bias = rng.standard_normal(n, np.float32)
    w = decoded(codes, format)

    y = pk.linear_f8w(x, codes, scale, format, bias)
    assert_within(y, x.astype(np.float64), w * scale[:, None], bias)
    y = pk.linear_f8w(x, codes, 0.5, format)
    assert_within(y, x.astype(np.float64), w * 0.5, None)


@each_format
def test_the_last_line_is_rounded_step_by_step(isa, format):
    """With one product per sum, y is acc * (s_x * s_w) + bias in float32 to the bit."""
    rng = np.random.default_rng(9)
    x_codes, w_codes = finite_codes(rng, (40, 1), format), finite_codes(rng, (50, 1), format)
    x_scale = rng.uniform(1e-3, 1, 40).astype(np.float32)
    w_scale = rng.uniform(1e-3, 1, 50).astype(np.float32)
    bias = rng.standard_normal(50, np.float32)
    acc = (decoded(x_codes, format) @ decoded(w_codes, format).T).astype(np.float32)
    y = pk.linear_f8(x_codes, x_scale, format, w_codes, w_scale, format, bias)
    expected = acc * (x_scale[:, None] * w_scale) + bias
    np.testing.assert_array_equal(y, expected)


@each_format
def test_nan_codes_and_scales_give_nan_rows(isa, format):
    """A NaN in a row of x gives that row NaN; the others keep their results."""
    rng = np.random.default_rng(1)
    x_codes, w_codes = finite_codes(rng, (17, 65), format), finite_codes(rng, (7, 65), format)
    scale, w_scale = np.ones(17, np.float32), np.ones(7, np.float32)
    expected = pk.linear_f8(x_codes, scale, format, w_codes, w_scale, format)
    x_codes[3, 64], scale[9] = 0x7F, np.nan
    y = pk.linear_f8(x_codes, scale, format, w_codes, w_scale, format)
    assert np.isnan(y[[3, 9]]).all()
    np.testing.assert_array_equal(np.delete(y, [3, 9], 0), np.delete(expected, [3, 9], 0))


@each_format
def test_any_strides_give_the_same_result(isa, format):
    """Slices, transposes and reversed arrays are read where they lie, or copied."""
    rng = np.random.default_rng(3)
    x, w = finite_codes(rng, (60, 60), format), finite_codes(rng, (60, 60), format)
    values = rng.standard_normal((60, 60), np.float32)
    scale = rng.uniform(0.1, 1, 120).astype(np.float32)[::2]
    for cut in (np.s_[:17, 5:40], np.s_[::3, :35], np.s_[::-1, ::-1], np.s_[:1, ::2]):
        xs, ws, vs, s = x[cut], w[cut], values[cut], scale[: len(w[cut])]
        np.testing.assert_array_equal(
            pk.linear_f8(xs, s, format, ws, s, format),
            pk.linear_f8(xs.copy(), s.copy(), format, ws.copy(), s.copy(), format),
        )
        np.testing.assert_array_equal(
            pk.linear_f8w(vs, ws, s, format), pk.linear_f8w(vs.copy(), ws.copy(), s.copy(), format)
        )
