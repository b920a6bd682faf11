"""int8 products against numpy: to the bit where both sides are int8."""

import functools
import itertools
import threading

import numpy as np
import pytest

import policy_kernels as pk

PART = 131072
SIZES_M = [0, 1, 2, 8, 15, 16, 17, 33]
SIZES_N = [1, 7, 31, 32, 33, 64, 100]
# The longest sums take the longest: for them, some sizes.
LONG = [(1, 1), (2, 33), (17, 7), (13, 40)]
each_k = pytest.mark.parametrize("k", [0, 1, 15, 63, 64, 65, 127, 1000, PART + 5])


def sizes(k):
    return LONG if k > PART else list(itertools.product(SIZES_M, SIZES_N))


def codes_reference(x_codes, x_scale, w_codes, w_scale, bias):
    """Products of codes in float64, which is exact below 2**53; the last line in float32."""
    x_codes, w_codes = x_codes.astype(np.float64), w_codes.astype(np.float64)
    acc = (x_codes[:, :PART] @ w_codes[:, :PART].T).astype(np.float32)
    for start in range(PART, x_codes.shape[1], PART):
        part = x_codes[:, start : start + PART] @ w_codes[:, start : start + PART].T
        acc += part.astype(np.float32)
    y = acc * (x_scale[:, None] * w_scale[None])
    return y if bias is None else y + bias


def quantized(x):
    """Codes and scales of finite rows, in numpy float32."""
    amax = np.max(np.abs(x), axis=1, initial=np.float32(2.0**-100))
    codes = np.clip(np.rint(x * (np.float32(127) / amax)[:, None]), -127, 127)
    return codes, amax / np.float32(127)


def arrays(m, n, k):
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    x = rng.standard_normal((m, k), np.float32)
    w_codes = rng.integers(-127, 128, (n, k), np.int8)
    w_scale = rng.uniform(1e-3, 1e-1, n).astype(np.float32)
    bias = rng.standard_normal(n, np.float32)
    return x, w_codes, w_scale, bias


def assert_bits(y, expected):
    assert y.dtype == np.float32
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


@functools.cache
def whole(k):
    """The largest operands of this k and their results; smaller sizes are parts of both."""
    x, w_codes, w_scale, bias = arrays(33, 100, k)
    x_codes, x_scale = quantized(x)
    total = codes_reference(x_codes, x_scale, w_codes, w_scale, None)
    return x, x_codes, x_scale, w_codes, w_scale, bias, total


@each_k
def test_linear_s8_equals_the_reference_to_the_bit(isa, k):
    """Rows quantized inside, exact sums, float32 last line: numpy's bits at every size."""
    x, _, _, w_codes, w_scale, bias, total = whole(k)
    for m, n in sizes(k):
        weight = pk.pack(w_codes[:n])
        expected = total[:m, :n]
        assert_bits(pk.linear_s8(x[:m], weight, w_scale[:n]), expected)
        assert_bits(pk.linear_s8(x[:m], weight, w_scale[:n], bias[:n]), expected + bias[:n])


@each_k
def test_linear_s8_codes_equals_the_reference_to_the_bit(isa, k):
    """Given codes multiply exactly, with parts of 131072 added in float32."""
    _, x_codes, x_scale, w_codes, w_scale, bias, total = whole(k)
    for m, n in sizes(k):
        weight = pk.pack(w_codes[:n])
        arguments = x_codes[:m].astype(np.int8), x_scale[:m], weight, w_scale[:n]
        expected = total[:m, :n]
        assert_bits(pk.linear_s8_codes(*arguments), expected)
        assert_bits(pk.linear_s8_codes(*arguments, bias[:n]), expected + bias[:n])


@each_k
def test_linear_s8w_is_within_1e_6_of_float64(isa, k):
    """The weight-only product is within 1e-6 of float64, scaled by sum |x| |w| + |bias|."""
    x, _, _, w_codes, w_scale, bias, _ = whole(k)
    w = w_codes * w_scale[:, None].astype(np.float64)
    exact, size = x @ w.T, np.abs(x).astype(np.float64) @ np.abs(w).T
    for m, n in sizes(k):
        weight = pk.pack(w_codes[:n])
        y = pk.linear_s8w(x[:m], weight, w_scale[:n])
        assert (np.abs(y - exact[:m, :n]) <= 1e-6 * size[:m, :n]).all()
        y = pk.linear_s8w(x[:m], weight, w_scale[:n], bias[:n])
        bound = 1e-6 * (size[:m, :n] + np.abs(bias[:n]))
        assert (np.abs(y - (exact[:m, :n] + bias[:n])) <= bound).all()


def test_plain_codes_give_what_packed_ones_give(isa):
    """Codes that are not packed are packed for the call."""
    x, _, _, w_codes, w_scale, bias, _ = whole(65)
    for kernel in (pk.linear_s8, pk.linear_s8w):
        packed = kernel(x, pk.pack(w_codes), w_scale, bias)
        assert_bits(kernel(x, w_codes, w_scale, bias), packed)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 25, 130])
def test_every_tile_height_gives_the_same_rows(isa, m):
    """Tiles of each height that a kernel has, and rows spread over several of them."""
    x, w_codes, w_scale, bias = arrays(130, 33, 200)
    weight = pk.pack(w_codes)
    x_codes, x_scale = quantized(x)
    expected = codes_reference(x_codes, x_scale, w_codes, w_scale, bias)
    assert_bits(pk.linear_s8(x[:m], weight, w_scale, bias), expected[:m])


def test_more_rows_than_fit_one_pass_give_the_same_bits(isa):
    """Rows whose tiles take more than 16 MB are multiplied in several passes."""
    rng = np.random.default_rng(6)
    x_codes = rng.integers(-127, 128, (66000, 256), np.int8)
    w_codes = rng.integers(-127, 128, (3, 256), np.int8)
    x_scale = rng.uniform(1e-3, 1e-1, 66000).astype(np.float32)
    one = np.ones(3, np.float32)
    expected = codes_reference(x_codes, x_scale, w_codes, one, None)
    assert_bits(pk.linear_s8_codes(x_codes, x_scale, w_codes, one), expected)


def test_codes_of_minus_128_multiply_exactly(isa):
    """Codes that no quantizer makes are codes all the same."""
    rng = np.random.default_rng(4)
    x_codes, w_codes = (rng.choice(np.int8([-128, 127, -127]), (r, 129)) for r in (5, 40))
    one = np.ones(40, np.float32)
    exact = x_codes.astype(np.float64) @ w_codes.T.astype(np.float64)
    y = pk.linear_s8_codes(x_codes, one[:5], w_codes, one)
    assert_bits(y, exact.astype(np.float32))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_of_one_part_does_not_overflow(isa, sign):
    """Codes of 127 and +-127 all along K = 131072 give exactly 127 * 127 * 131072."""
    x_codes = np.full((2, PART), 127, np.int8)
    w_codes = np.full((3, PART), 127 * sign, np.int8)
    y = pk.linear_s8_codes(x_codes, np.ones(2, np.float32), w_codes, np.ones(3, np.float32))
    assert (y == np.float32(sign * 127 * 127 * PART)).all()


def test_three_parts_are_added_first_to_last_in_float32(isa):
    """A sum whose parts cancel shows their order: (big + small) + -big, each in float32."""
    k = 2 * PART + 7
    x_codes = np.full((1, k), 127, np.int8)
    w_codes = np.zeros((1, k), np.int8)
    w_codes[0, :PART], w_codes[0, PART : 2 * PART], w_codes[0, 2 * PART :] = 127, -127, 1
    w_codes[0, 2 * PART - 1] = -126
    one = np.ones(1, np.float32)
    big, second = 127 * 127 * PART, -127 * (127 * (PART - 1) + 126)
    expected = np.float32(big) + np.float32(second) + np.float32(127 * 7)
    assert pk.linear_s8_codes(x_codes, one, w_codes, one)[0, 0] == expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_a_row_of_nan(isa, value):
    """Other rows have the result they have without it."""
    x, w_codes, w_scale, bias = arrays(17, 7, 65)
    expected = pk.linear_s8(x, w_codes, w_scale, bias)
    x[5, 64] = value
    y = pk.linear_s8(x, w_codes, w_scale, bias)
    assert np.isnan(y[5]).all()
    assert_bits(np.delete(y, 5, axis=0), np.delete(expected, 5, axis=0))


def test_a_nan_row_stays_nan_where_weights_are_zero_or_absent(isa):
    """Neither zero codes nor K = 0 hide a scale of NaN."""
    nan, one = np.full(1, np.nan, np.float32), np.ones(1, np.float32)
    for k in (0, 3):
        zeros = np.zeros((1, k), np.int8)
        assert np.isnan(pk.linear_s8_codes(zeros, nan, zeros, one, one)).all()


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-38, 1e-30])
def test_tiny_rows_equal_the_reference(isa, amax):
    """Rows at or below the floor of amax give numpy's bits, zeros give the bias."""
    _, w_codes, w_scale, bias = arrays(2, 7, 65)
    x = np.linspace(-amax, amax, 130).astype(np.float32).reshape(2, 65)
    x_codes, x_scale = quantized(x)
    expected = codes_reference(x_codes, x_scale, w_codes, w_scale, bias)
    assert_bits(pk.linear_s8(x, w_codes, w_scale, bias), expected)
    if amax == 0:
        assert_bits(pk.linear_s8(x, w_codes, w_scale, bias), np.broadcast_to(bias, (2, 7)).copy())


def test_a_batch_equals_its_rows(isa):
    """A row's result does not depend on the rows beside it."""
    x, w_codes, w_scale, bias = arrays(33, 31, 65)
    whole = pk.linear_s8(x, w_codes, w_scale, bias)
    single = [pk.linear_s8(x[i : i + 1], w_codes, w_scale, bias) for i in range(33)]
    assert_bits(whole, np.concatenate(single))


@pytest.mark.parametrize("kernel", [pk.linear_s8, pk.linear_s8w])
def test_any_strides_give_the_same_result(isa, kernel):
    """Slices, transposes and reversed arrays are read where they lie, or copied."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((60, 60), np.float32)
    w = rng.integers(-127, 128, (60, 60), np.int8)
    scale = rng.uniform(0.1, 1, 120).astype(np.float32)
    for cut in (np.s_[:17, 5:40], np.s_[::3, :35], np.s_[::-1, ::-1], np.s_[:1, ::2]):
        for xs, ws in ((x[cut], w[cut]), (x[cut].T, w[cut].T)):
            s, b = scale[::2][: len(ws)], scale[::-2][: len(ws)]
            expected = kernel(xs.copy(), ws.copy(), s.copy(), b.copy())
            assert_bits(kernel(xs, ws, s, b), expected)


def test_threads_get_the_results_that_one_gets(isa):
    """Calls from eight threads at once do not disturb each other."""
    x, w_codes, w_scale, bias = arrays(33, 33, 65)
    expected = pk.linear_s8(x, w_codes, w_scale, bias)
    results = [None] * 8

    def work(i):
        for _ in range(50):
            results[i] = pk.linear_s8(x, w_codes, w_scale, bias)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_bits(result, expected)
