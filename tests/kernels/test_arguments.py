"""What the Python functions refuse, and what they say."""

import numpy as np
import pytest

import policy_kernels as pk

X = np.ones((2, 3), np.float32)
W8 = np.ones((4, 3), np.int8)
WU = np.ones((4, 3), np.uint8)
S = np.ones(4, np.float32)
E4 = "float8_e4m3fn"

TYPE_ERRORS = [
    (lambda: pk.quantize_rows_s8([[1.0]]), r"x to be a float32 numpy array .* got \[\[1.0\]\]"),
    (lambda: pk.quantize_rows_s8(X.astype(np.float64)), r"got float64 array of shape \(2, 3\)"),
    (lambda: pk.quantize_rows_s8(X.astype(">f4")), r"x to be a float32 .* got >f4 array"),
    (lambda: pk.quantize_rows_f8(X.astype(np.float16), E4), r"got float16 array"),
    (lambda: pk.encode_f8(X, "1", E4), r"scale to be a float, got '1'"),
    (lambda: pk.encode_f8(X.astype(int), 1.0, E4), r"x to be a float32 .* got int64 array"),
    (lambda: pk.decode_f8(W8, E4), r"codes to be a uint8 .* got int8 array"),
    (lambda: pk.linear_s8(X, WU, S), r"weight to be a int8 .* got uint8 array"),
    (lambda: pk.linear_s8(X, W8, S.astype(float)), r"scale to be a float32 .* got float64"),
    (lambda: pk.linear_s8(X, W8, 1.0), r"scale to be a float32 .* got 1.0"),
    (lambda: pk.linear_s8w(X, W8, S, [0.0]), r"bias to be a float32 or .* got \[0.0\]"),
    (lambda: pk.linear_s8(X.astype(float), W8, S), r"x to be a float32 or .* got float64 array"),
    (lambda: pk.linear_s8(X.astype(">f2"), W8, S), r"x to be a float32 or .* got >f2 array"),
    (lambda: pk.linear_s8(X, pk.pack(WU, E4), S), r"int8 codes, got PackedWeight\(float8_e4m3fn"),
    (lambda: pk.linear_f8w(X, pk.pack(W8), S, E4), r"e4m3fn codes, got PackedWeight\(int8, n=4"),
    (lambda: pk.pack(WU), r"codes to be .* int8, uint8 with dtype=..., or float8 .* got uint8"),
    (lambda: pk.pack(WU, "int8"), r"codes to be a numpy array of int8 and .* got uint8"),
    (lambda: pk.pack(W8, E4), r"codes to be .* float8_e4m3fn or uint8 .* got int8"),
    (lambda: pk.pack([[1]]), r"got \[\[1\]\]"),
    (lambda: pk.linear_s8_codes(X, S[:2], W8, S), r"x_codes to be a int8 .* got float32"),
    (lambda: pk.linear_f8(W8, 1.0, E4, WU, S, E4), r"x_codes to be a uint8 .* got int8"),
    (lambda: pk.linear_f8(WU, None, E4, WU, S, E4), r"x_scale to be a float32 .* got None"),
    (lambda: pk.linear_f8w(X, WU, S.astype(float), E4), r"shape \(4,\) or \(\), got float64"),
]

VALUE_ERRORS = [
    (lambda: pk.quantize_rows_s8(X[0]), r"x to have shape \(m, k\), got \(3,\)"),
    (lambda: pk.quantize_rows_f8(X[None], E4), r"x to have shape \(m, k\), got \(1, 2, 3\)"),
    (lambda: pk.quantize_rows_f8(X, "float8"), r"format to be one of .*e4m3fn.*, got 'float8'"),
    (lambda: pk.encode_f8(X, 1.0, None), r"format to be one of .*, got None"),
    (lambda: pk.encode_f8(X, 0.0, E4), r"scale > 0 and finite \(or NaN\), got 0"),
    (
        lambda: pk.encode_f8(X, 1e-60, E4),
        r"pk_encode_f8: expected scale > 0 and finite \(or NaN\), got 0",
    ),
    (lambda: pk.encode_f8(X, 1e60, E4), r"scale > 0 and finite \(or NaN\), got inf"),
    (lambda: pk.decode_f8(WU, "float8_e4m3"), r"format to be one of"),
    (lambda: pk.linear_s8(X, W8[:, :2], S), r"x to have shape \(m, k\) with k=2, got \(2, 3\)"),
    (lambda: pk.linear_s8(X, W8, S[:3]), r"scale to have shape \(4,\), got \(3,\)"),
    (lambda: pk.linear_s8(X, W8, S[:, None]), r"scale to have shape \(4,\), got \(4, 1\)"),
    (lambda: pk.linear_s8(X, W8, S, S[:1]), r"bias to have shape \(4,\), got \(1,\)"),
    (lambda: pk.linear_s8_codes(W8, S[:3], W8, S), r"x_scale to have shape \(4,\), got \(3,\)"),
    (lambda: pk.linear_f8(WU, S[:1], E4, WU, S, E4), r"x_scale to have shape \(4,\), got \(1,\)"),
    (lambda: pk.linear_f8(WU, S, E4, WU, S, "e5"), r"w_format to be one of .*, got 'e5'"),
    (lambda: pk.linear_f8w(X, WU[0], S, E4), r"weight to have shape .*, got \(3,\)"),
    (lambda: pk.linear_f8w(X, pk.pack(W8), S), r"format to be one of .*, got 'int8'"),
    (lambda: pk.linear_s8(X, W8, S, dtype="float64"), r"dtype to be one of .*, got 'float64'"),
    (lambda: pk.pack(W8[0]), r"codes to have shape \(n, k\), got \(3,\)"),
    (lambda: pk.pack(W8, "int4"), r"dtype to be one of .*, got 'int4'"),
    (lambda: pk.set_num_threads(0), r"count from 1 to 1024, or None for the default, got 0"),
    (lambda: pk.set_num_threads(-1), r"expected count from 1 to 1024.*, got -1"),
    (lambda: pk.set_num_threads(5000), r"expected count from 1 to 1024.*, got 5000"),
    (lambda: pk.kernel_name("linear_s9"), r"expected an operation, got 'linear_s9'"),
    (lambda: pk.set_isa("avx9"), r"got 'avx9'. Compiled: scalar"),
]


@pytest.mark.parametrize(("call", "message"), TYPE_ERRORS)
def test_wrong_types_are_named(call, message):
    """Another type or dtype raises TypeError with what was expected and what came."""
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), VALUE_ERRORS)
def test_wrong_values_are_named(call, message):
    """Another shape, format or scale raises ValueError with what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        call()


def test_results_do_not_share_memory_with_arguments():
    """Codes and results are new arrays."""
    codes, scale = pk.quantize_rows_s8(X)
    y = pk.linear_s8(X, W8, S, S)
    assert not any(np.shares_memory(out, X) for out in (codes, scale, y))
    assert all(out.flags.writeable and out.flags.c_contiguous for out in (codes, scale, y))


def test_read_only_arguments_are_accepted():
    """Arguments are only read, so arrays that cannot be written, as from a file, will do."""
    frozen = [array.copy() for array in (X, W8, S, S)]
    for array in frozen:
        array.flags.writeable = False
    np.testing.assert_array_equal(pk.linear_s8(*frozen), pk.linear_s8(X, W8, S, S))
