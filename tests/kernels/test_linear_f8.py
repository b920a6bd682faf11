"""float8 products against float64."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest

import policy_kernels as pk

DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
SIZES_M = [0, 1, 2, 8, 15, 16, 17, 33]
SIZES_N = [1, 7, 31, 32, 33, 64, 100]
LONG = [(1, 1), (2, 33), (17, 7), (13, 40)]
each_k = pytest.mark.parametrize("k", [0, 1, 15, 63, 64, 65, 127, 1000, 131072 + 5])
each_format = pytest.mark.parametrize("format", DTYPES)


def finite_codes(rng, shape, format):
    """Random codes of all finite values of a format."""
    codes = np.arange(256, dtype=np.uint8)
    finite = codes[np.isfinite(codes.view(DTYPES[format]).astype(np.float32))]
    return rng.choice(finite, shape)


def decoded(codes, format):
    return codes.view(DTYPES[format]).astype(np.float64)


def sizes(k):
    return LONG if k > 131072 else list(itertools.product(SIZES_M, SIZES_N))


@functools.cache
def whole(k, format):
    """The largest operands of this k; smaller sizes are parts of them."""
    rng = np.random.default_rng(k)
    x_codes, w_codes = finite_codes(rng, (33, k), format), finite_codes(rng, (100, k), format)
    x_scale = rng.uniform(1e-3, 1, 33).astype(np.float32)
    w_scale = rng.uniform(1e-3, 1, 100).astype(np.float32)
    return x_codes, x_scale, w_codes, w_scale, rng.standard_normal(100, np.float32)


@functools.cache
def exact(k, format, values):
    """x, and x @ w.T and |x| @ |w|.T in float64, for x of codes or of floats of a dtype."""
    x_codes, x_scale, w_codes, w_scale, _ = whole(k, format)
    w = decoded(w_codes, format) * w_scale[:, None]
    if values == "codes":
        x = decoded(x_codes, format) * x_scale[:, None]
        given = x_codes
    else:
        given = np.random.default_rng(k).standard_normal((33, k), np.float32).astype(values)
        x = given.astype(np.float64)
    return given, x @ w.T, np.abs(x) @ np.abs(w).T


def assert_within(y, exact, size):
    """Within 1e-6 of float64, scaled by sum |x| |w| + |bias|."""
    assert y.dtype == np.float32
    assert y.shape == exact.shape
    assert (np.abs(y - exact) <= 1e-6 * size).all()


@each_format
@each_k
def test_linear_f8_is_within_1e_6_of_float64(isa, k, format):
    """Scales per row and per tensor, with and without bias, at every size."""
    _, x_scale, w_codes, w_scale, bias = whole(k, format)
    x, product, size = exact(k, format, "codes")
    for m, n in sizes(k):
        weight = pk.pack(w_codes[:n], format)
        b = bias[:n]
        y = pk.linear_f8(x[:m], x_scale[:m], format, weight, w_scale[:n], format, b)
        assert_within(y, product[:m, :n] + b, size[:m, :n] + np.abs(b))
    one = np.float32(0.37)
    y = pk.linear_f8(x[:17], one, format, pk.pack(w_codes, format), one, format)
    each = float(one) ** 2 / (x_scale[:17, None] * w_scale.astype(np.float64))
    assert_within(y, product[:17] * each, size[:17] * each * (1 + 1e-6))


@each_format
@each_k
@pytest.mark.parametrize("values", [np.float32, ml_dtypes.bfloat16])
def test_linear_f8w_is_within_1e_6_of_float64(isa, k, format, values):
    """float32 and bfloat16 rows against float8 weights, at every size."""
    _, _, w_codes, w_scale, bias = whole(k, format)
    x, product, size = exact(k, format, values)
    for m, n in sizes(k):
        weight = pk.pack(w_codes[:n], format)
        b = bias[:n]
        y = pk.linear_f8w(x[:m], weight, w_scale[:n], bias=b, dtype="float32")
        assert_within(y, product[:m, :n] + b, size[:m, :n] + np.abs(b))
    one = np.float32(0.5)
    y = pk.linear_f8w(x[:17], pk.pack(w_codes, format), 0.5, dtype="float32")
    each = one / w_scale.astype(np.float64)
    assert_within(y, product[:17] * each, size[:17] * each * (1 + 1e-6))


@pytest.mark.parametrize("x_format", DTYPES)
@each_format
def test_the_two_formats_may_differ(isa, x_format, format):
    """Gradients are e5m2 where weights are e4m3fn."""
    rng = np.random.default_rng(2)
    x_codes, w_codes = finite_codes(rng, (17, 130), x_format), finite_codes(rng, (33, 130), format)
    x, w = decoded(x_codes, x_format), decoded(w_codes, format)
    y = pk.linear_f8(x_codes, 1.0, x_format, w_codes, 1.0, format)
    assert_within(y, x @ w.T, np.abs(x) @ np.abs(w).T)


@each_format
@pytest.mark.parametrize("values", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("k", [1000, 131072 + 5])
def test_rounding_does_not_pile_up(isa, format, values, k):
    """A sum of equal terms, each of which rounds the same way, keeps within the bound."""
    x = np.full((2, k), 0.1, values)
    for code in (0x39, 0x3F):
        w_codes = np.full((3, k), code, np.uint8)
        term = float(x[0, 0]) * decoded(w_codes[:1, :1], format)[0, 0]
        y = pk.linear_f8w(x, w_codes, 1.0, format, dtype="float32")
        assert_within(y, np.full((2, 3), term * k), np.full((2, 3), term * k))
        y = pk.linear_s8w(x, np.full((3, k), 111, np.int8), np.ones(3, np.float32), dtype="float32")
        exact = float(x[0, 0]) * 111 * k
        assert_within(y, np.full((2, 3), exact), np.full((2, 3), exact))


@each_format
@pytest.mark.parametrize("values", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-39, 1e-37, 1e-34, 1e-30, 1e-24])
@pytest.mark.parametrize("k", [70, 4200])
def test_tiny_values_are_not_lost(isa, format, values, magnitude, k):
    """Rows so small that some instructions would take them, or their products, for zero."""
    rng = np.random.default_rng(8)
    x = (rng.uniform(0.5, 1, (14, k)) * magnitude).astype(values)
    x[1] = 1
    x[1, 3] = magnitude
    w_codes = np.full((5, k), 0x7B, np.uint8)  # the largest values
    w_codes[2] = 0x01  # and the smallest
    w = decoded(w_codes, format)
    y = pk.linear_f8w(x, w_codes, 1.0, format, dtype="float32").astype(np.float64)
    x = x.astype(np.float64)
    # A float32 below 2^-126 has steps of 2^-149.
    bound = 1e-6 * (np.abs(x) @ np.abs(w).T) + k * 2.0**-149
    assert (np.abs(y - x @ w.T) <= bound).all()


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
