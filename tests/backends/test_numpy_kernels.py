"""The reference in numpy and the native kernels give one answer."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policy_kernels
from policy_core.testing import hard_arrays, same_bits
from policy_numpy import _kernels, encode, quantize
from policy_numpy._quantize import reference_encode, reference_quantize

E4M3 = "float8_e4m3fn"

needs_kernels = pytest.mark.skipif(
    not policy_kernels.available(), reason="this installation has no native kernels to compare"
)


def operands(m: int, k: int, n: int, seed: int) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((m, k), np.float32) * np.float32(10)
    weight = generator.standard_normal((n, k), np.float32)
    return x, weight, generator.standard_normal(n, np.float32)


sizes = st.tuples(st.integers(0, 20), st.integers(1, 200), st.integers(1, 40), st.integers(0, 99))


@needs_kernels
@given(sizes, st.booleans())
def test_int8_native_equals_reference(size: tuple[int, int, int, int], with_bias: bool) -> None:
    """The native int8 product has the bits of the plain reading, whichever kernel runs."""
    x, weight, bias = operands(*size)
    if len(x):
        x[0, 0] = np.nan
    codes, scale = quantize(weight, "int8", (1,))
    arguments = (x, codes, scale.reshape(-1), bias if with_bias else None)
    assert same_bits(_kernels.linear_s8(*arguments), _kernels.reference_linear_s8(*arguments))


@pytest.mark.parametrize("k", [1, 1040, 131_072, 131_073, 262_149])
def test_int8_sum_is_exact_at_the_largest_codes(k: int) -> None:
    """Codes of ±127 all along a contraction of any length give the exact integer sum."""
    x = np.full((1, k), -127.0, np.float32)
    codes = np.full((2, k), 127, np.int8)
    codes[1, ::2] = -127
    y = _kernels.linear_s8(x, codes, np.ones(2, np.float32), None)
    reference = _kernels.reference_linear_s8(x, codes, np.ones(2, np.float32), None)
    assert same_bits(y, reference)
    if k <= _kernels.MAX_CONTRACTION:
        exact = x.astype(np.int64) @ codes.T.astype(np.int64)
        assert same_bits(y, exact.astype(np.float32))


def bound(x: Any, weight: Any, scale: Any) -> Any:
    """Numerics' bound for float8 products, and the rounding of scale and bias."""
    return 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64)) * scale


@pytest.mark.parametrize("formats", [(E4M3, E4M3), ("float8_e5m2", E4M3)], ids="-".join)
@given(size=sizes)
def test_float8_is_near_the_exact_sum(
    formats: tuple[str, str], size: tuple[int, int, int, int]
) -> None:
    """float8 products are within 1e-6 of float64, natively and in the plain reading."""
    x, weight, _ = operands(*size)
    x_codes, x_scale = quantize(x, formats[0], (1,))
    codes, scale = quantize(weight, formats[1], (1,))
    arguments = (x_codes, x_scale.reshape(-1), codes, scale.reshape(-1), None)
    factor = x_scale.astype(np.float64) * scale.reshape(-1)
    exact = x_codes.astype(np.float64) @ codes.T.astype(np.float64) * factor
    limit = bound(x_codes.astype(np.float32), codes.astype(np.float32), factor)
    for product in (_kernels.linear_f8, _kernels.reference_linear_f8):
        assert (np.abs(product(*arguments) - exact) <= limit).all()


@pytest.mark.parametrize("dtype", ["int8", E4M3])
@given(size=sizes)
def test_weight_only_is_near_the_exact_sum(dtype: str, size: tuple[int, int, int, int]) -> None:
    """Weight-only products are within 1e-6 of float64, natively and in the plain reading."""
    x, weight, _ = operands(*size)
    codes, scale = quantize(weight, dtype, (1,))
    row = scale.reshape(-1)
    exact = x.astype(np.float64) @ codes.T.astype(np.float64) * row
    limit = bound(x, codes.astype(np.float32), row)
    native = _kernels.linear_s8w if dtype == "int8" else _kernels.linear_f8w
    for product in (native, _kernels.reference_weight_only):
        assert (np.abs(product(x, codes, row, None) - exact) <= limit).all()


def test_encode_covers_all_bfloat16_values() -> None:
    """Every bfloat16 becomes the nearest code, halves to even, saturated; NaN stays NaN."""
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = x[~np.isnan(x)]
    for dtype, largest in ((E4M3, 448), ("float8_e5m2", 57344)):
        codes = encode(x, np.full((), 1, np.float32), dtype)
        wanted = np.clip(x, -largest, largest).astype(getattr(ml_dtypes, dtype))
        assert same_bits(codes, wanted)
    if policy_kernels.available():
        native = policy_kernels.encode_f8(x, 1.0, E4M3)
        assert same_bits(native, encode(x, np.full((), 1, np.float32), E4M3).view(np.uint8))


@needs_kernels
@pytest.mark.parametrize("dtype", [E4M3, "float8_e5m2"])
def test_native_row_quantizer_equals_the_formula(dtype: str) -> None:
    """The native quantizers give the formula's codes and scales to the bit."""
    x, _, _ = operands(9, 65, 1, 3)
    x[2], x[3, 4] = 0, np.inf
    codes, scale = reference_quantize(x, dtype, (1,))
    native_codes, native_scale = policy_kernels.quantize_rows_f8(x, dtype)
    assert same_bits(native_scale, scale.reshape(-1))
    assert same_bits(native_codes, codes.view(np.uint8))
    codes, scale = reference_quantize(x, "int8", (1,))
    native_codes, native_scale = policy_kernels.quantize_rows_s8(x)
    assert same_bits(native_scale, scale.reshape(-1))
    assert same_bits(native_codes, codes)


@needs_kernels
@pytest.mark.parametrize("dtype", ["int8", E4M3, "float8_e5m2"])
@pytest.mark.parametrize("array", hard_arrays())
def test_hard_arrays_have_the_formulas_codes(array: Any, dtype: str) -> None:
    """On arrays that quantizers are known to fail on, the kernels have the formula's bits."""
    codes, scale = quantize(array, dtype, (1,))
    wanted_codes, wanted_scale = reference_quantize(array, dtype, (1,))
    assert same_bits(scale, wanted_scale)
    assert same_bits(codes, wanted_codes)
    if dtype != "int8":
        for factor in (np.full((), 0.37, np.float32), np.full((), np.nan, np.float32)):
            assert same_bits(encode(array, factor, dtype), reference_encode(array, factor, dtype))


@needs_kernels
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["int8", E4M3])
def test_rows_have_the_formulas_bits(dtype: str, target: str) -> None:
    """Rows of a quantized table are the same natively and in numpy."""
    codes, scale = quantize(np.random.default_rng(0).standard_normal((20, 33)), dtype, (1,))
    ids = np.array([[0, 19], [3, 3]])
    wanted = _kernels.reference_rows(codes, scale, ids, target)
    assert same_bits(_kernels.rows(codes, scale, ids, target), wanted)


def test_table_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel table names the native kernels, or numpy with the reason that they are not."""
    rows = {name: (kernel, note) for name, kernel, note in _kernels.kernel_table()}
    if policy_kernels.available():
        assert rows["linear_s8"][0] == policy_kernels.kernel_name("linear_s8")
    monkeypatch.setattr(policy_kernels, "available", lambda: False)
    rows = {name: (kernel, note) for name, kernel, note in _kernels.kernel_table()}
    assert rows["linear_s8"][0] == "linear_s8_numpy"
    assert "no native kernels" in rows["linear_s8"][1]


def test_everything_works_without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native library each product is computed in numpy, int8 to the same bits."""
    x, weight, bias = operands(5, 33, 7, 1)
    codes, scale = quantize(weight, "int8", (1,))
    f8, f8_scale = quantize(weight, E4M3, (1,))
    x8, x8_scale = quantize(x, E4M3, (1,))
    row, f8_row, x8_row = scale.reshape(-1), f8_scale.reshape(-1), x8_scale.reshape(-1)
    before = _kernels.linear_s8(x, codes, row, bias)
    near = [
        _kernels.linear_s8w(x, codes, row, bias),
        _kernels.linear_f8w(x, f8, f8_row, bias),
        _kernels.linear_f8(x8, x8_row, f8, f8_row, bias),
    ]
    monkeypatch.setattr(policy_kernels, "available", lambda: False)
    assert same_bits(_kernels.linear_s8(x, codes, row, bias), before)
    again = [
        _kernels.linear_s8w(x, codes, row, bias),
        _kernels.linear_f8w(x, f8, f8_row, bias),
        _kernels.linear_f8(x8, x8_row, f8, f8_row, bias),
    ]
    for left, right in zip(near, again, strict=True):
        assert np.allclose(left, right, rtol=1e-5, atol=1e-4)
