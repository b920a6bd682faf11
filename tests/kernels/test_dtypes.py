"""Rows, biases and results in float32, bfloat16 and float16."""

import ml_dtypes
import numpy as np
import pytest

import policy_kernels as pk

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
each_x = pytest.mark.parametrize("x_dtype", DTYPES)
each_y = pytest.mark.parametrize("y_dtype", DTYPES)
E4 = "float8_e4m3fn"


def operands(m=19, n=70, k=130):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32)
    codes = rng.integers(-127, 128, (n, k), np.int8)
    scale = rng.uniform(1e-3, 1e-1, n).astype(np.float32)
    return x, codes, scale, rng.standard_normal(n, np.float32)


def bits(y):
    return y.view(np.uint32 if y.itemsize == 4 else np.uint16)


@each_y
@pytest.mark.parametrize("bias_dtype", DTYPES)
@each_x
def test_linear_s8_converts_at_the_ends_alone(isa, x_dtype, bias_dtype, y_dtype):
    """The result is the float32 one of the widened operands, rounded once."""
    x, codes, scale, bias = operands()
    x, bias = x.astype(DTYPES[x_dtype]), bias.astype(DTYPES[bias_dtype])
    wide = pk.linear_s8(x.astype(np.float32), codes, scale, bias.astype(np.float32))
    y = pk.linear_s8(x, codes, scale, bias, dtype=y_dtype)
    assert y.dtype == DTYPES[y_dtype]
    np.testing.assert_array_equal(bits(y), bits(wide.astype(DTYPES[y_dtype])))


@each_x
def test_results_have_the_dtype_of_x(isa, x_dtype):
    """Unless another is asked for, as a name or as a dtype."""
    x, codes, scale, bias = operands()
    x = x.astype(DTYPES[x_dtype])
    weight, weight8 = pk.pack(codes), pk.pack(codes.view(np.uint8) & 0x7B, E4)
    for kernel, w in ((pk.linear_s8, weight), (pk.linear_s8w, weight), (pk.linear_f8w, weight8)):
        assert kernel(x, w, scale, bias=bias).dtype == x.dtype
        assert kernel(x, w, scale, dtype=np.dtype(np.float16)).dtype == np.float16
        assert kernel(x, w, scale, dtype="bfloat16").dtype == ml_dtypes.bfloat16


@each_y
@each_x
def test_weight_only_products_keep_the_bound_in_every_dtype(isa, x_dtype, y_dtype):
    """1e-6 * sum |x * w| for the sum, and one rounding to the result's dtype."""
    x, codes, scale, bias = operands()
    x = x.astype(DTYPES[x_dtype])
    y = pk.linear_s8w(x, codes, scale, bias, dtype=y_dtype)
    w = codes * scale[:, None].astype(np.float64)
    exact = x.astype(np.float64) @ w.T + bias
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T + np.abs(bias)
    step = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[y_dtype]
    assert (np.abs(y.astype(np.float64) - exact) <= 1e-6 * size + step * np.abs(exact)).all()


@each_y
def test_results_round_as_numpy_does(isa, y_dtype):
    """Every kind of float32: ties, subnormals, overflow to infinity, infinities and NaN."""
    dtype = DTYPES[y_dtype]
    rng = np.random.default_rng(1)
    halves = np.arange(65536, dtype=np.uint16)
    edges = [np.float16, ml_dtypes.bfloat16]
    values = np.concatenate([halves.view(d).astype(np.float32) for d in edges])
    with np.errstate(over="ignore", invalid="ignore"):
        between = (values + np.roll(values, 1)) * np.float32(0.5)
    random = rng.integers(0, 2**32, 100000, np.uint32).view(np.float32)
    bias = np.concatenate([values, between, random]).astype(np.float32)
    # A product of zeros plus the bias brings any value to the end; -0 + 0 is 0.
    zeros = np.zeros((1, 1), np.float32)
    y = pk.linear_s8(
        zeros,
        np.zeros((len(bias), 1), np.int8),
        np.ones(len(bias), np.float32),
        bias,
        dtype=y_dtype,
    )[0]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (bias + np.float32(0)).astype(dtype)
    nan = np.isnan(bias)
    assert np.isnan(y[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(bits(y[~nan]), bits(expected[~nan]))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_half_is_read_exactly(isa, name):
    """All 65536 bit patterns of x and of the bias have the value that numpy gives them."""
    halves = np.arange(65536, dtype=np.uint16).view(DTYPES[name])
    finite = halves[np.isfinite(halves.astype(np.float32))]
    n = len(finite)
    ones = np.ones(n, np.float32)
    y = pk.linear_s8(np.zeros((1, 1), np.float32), np.zeros((n, 1), np.int8), ones, finite)
    np.testing.assert_array_equal(y[0], finite.astype(np.float32) + np.float32(0))
    one = np.ones((1, 1), np.int8)
    y = pk.linear_s8w(finite[:, None], one, ones[:1], dtype="float32")
    np.testing.assert_array_equal(y[:, 0], finite.astype(np.float32))


@each_x
def test_rows_that_are_not_finite_give_nan_in_every_dtype(isa, x_dtype):
    """A NaN or infinity spoils its own row and no other."""
    x, codes, scale, bias = operands()
    x = x.astype(DTYPES[x_dtype])
    expected = pk.linear_s8(x, codes, scale, bias)
    for value in (np.nan, np.inf, -np.inf):
        spoiled = x.copy()
        spoiled[5, 129] = value
        y = pk.linear_s8(spoiled, codes, scale, bias)
        assert np.isnan(y[5].astype(np.float32)).all()
        np.testing.assert_array_equal(bits(np.delete(y, 5, 0)), bits(np.delete(expected, 5, 0)))
