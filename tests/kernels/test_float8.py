"""float32 to float8 codes and back, against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

import policy_kernels as pk
from policy_kernels._loader import check, library

FORMATS = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}
each_format = pytest.mark.parametrize("format", FORMATS)


def encode_reference(x, scale, format):
    """Divide and clamp in numpy float32, then ml_dtypes' cast, which rounds to nearest even."""
    dtype, largest = FORMATS[format]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        quotient = (x / np.float32(scale)).astype(np.float32)
        return np.clip(quotient, -largest, largest).astype(dtype).view(np.uint8)


def assert_encodes(x, scale, format):
    codes = pk.encode_f8(x, scale, format)
    assert codes.dtype == np.uint8
    np.testing.assert_array_equal(codes, encode_reference(x, scale, format))


@each_format
def test_all_256_codes_decode_exactly(isa, format):
    """Every code has the float32 bits that ml_dtypes gives, the sign of NaN included."""
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(FORMATS[format][0]).astype(np.float32)
    values = pk.decode_f8(codes, format)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@each_format
def test_every_code_survives_decode_and_encode(isa, format):
    """Encoding a decoded code gives it back, unless it is an infinity or a NaN with a payload."""
    codes = np.arange(256, dtype=np.uint8)
    values = pk.decode_f8(codes, format)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(pk.encode_f8(values, 1.0, format)[finite], codes[finite])


@each_format
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-100, 1e30])
def test_all_bfloat16_values_encode_as_ml_dtypes_does(isa, format, scale):
    """Every bfloat16 bit pattern, with NaNs, infinities and subnormals, gives the same code."""
    patterns = np.arange(65536, dtype=np.uint32) << 16
    assert_encodes(patterns.view(np.float32), scale, format)


@each_format
def test_ties_and_their_neighbours_encode_as_ml_dtypes_does(isa, format):
    """Half-way points between codes go to the even one, the floats beside them to the nearer."""
    values = np.arange(256, dtype=np.uint8).view(FORMATS[format][0]).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    for x in (ties, np.nextafter(ties, np.float32(-9e9)), np.nextafter(ties, np.float32(9e9))):
        assert_encodes(x, 1.0, format)


@each_format
@pytest.mark.parametrize("seed", range(3))
def test_random_float32_bits_encode_as_ml_dtypes_does(isa, format, seed):
    """A million random float32 bit patterns, most of them near the format's range."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    near = np.exp2(rng.uniform(-20, 18, 500_000)) * rng.choice([-1.0, 1.0], 500_000)
    assert_encodes(np.concatenate([bits, near.astype(np.float32)]), 1.0, format)
    assert_encodes(near.astype(np.float32), 0.0123, format)


@each_format
def test_infinities_saturate_and_nan_keeps_its_sign(isa, format):
    """Infinity gives the largest finite value; a NaN gives the NaN of its own sign."""
    dtype, largest = FORMATS[format]
    x = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
    values = pk.encode_f8(x, 1.0, format).view(dtype).astype(np.float32)
    assert values[:2].tolist() == [largest, -largest]
    assert np.isnan(values[2:]).all()
    assert np.signbit(values[2:]).tolist() == [False, True]


@each_format
def test_scale_nan_makes_every_code_nan(isa, format):
    """A NaN scale, which stands for a row that is not finite, spoils all codes."""
    codes = pk.encode_f8(np.array([0.0, 1.0, -2.0], np.float32), np.nan, format)
    assert np.isnan(pk.decode_f8(codes, format)).all()


@each_format
def test_encode_and_decode_keep_the_shape(isa, format):
    """Arrays of any rank and memory order go through, scalars and empty ones too."""
    base = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
    for x in (base, base.T, base[:, ::2], base[0, 0, :1].reshape(()), base[:0], base[..., ::-1]):
        codes = pk.encode_f8(x, 0.5, format)
        np.testing.assert_array_equal(codes, encode_reference(x, 0.5, format))
        assert pk.decode_f8(codes, format).shape == x.shape


@each_format
@pytest.mark.parametrize("k", [0, 1, 15, 63, 64, 65, 131072 + 5])
@pytest.mark.parametrize("m", [0, 1, 2, 8, 15, 16, 17, 33])
def test_quantized_rows_equal_the_reference_to_the_bit(isa, m, k, format):
    """Scales and codes per row equal numpy's at every size."""
    x = np.random.default_rng(m * 1000 + k).standard_normal((m, k), np.float32)
    codes, scale = pk.quantize_rows_f8(x, format)
    amax = np.max(np.abs(x), axis=1, initial=np.float32(2.0**-100))
    expected_scale = amax / np.float32(FORMATS[format][1])
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, encode_reference(x, expected_scale[:, None], format))


@each_format
@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-38, 1e-30, 3.4e38])
def test_extreme_rows_have_finite_positive_scales(isa, amax, format):
    """Zeros, subnormals and the largest floats quantize as the reference does."""
    x = np.linspace(-amax, amax, 67).astype(np.float32)[None]
    codes, scale = pk.quantize_rows_f8(x, format)
    raised = max(np.float32(amax), np.float32(2.0**-100))
    assert scale[0] == raised / np.float32(FORMATS[format][1])
    np.testing.assert_array_equal(codes, encode_reference(x, scale[0], format))


@each_format
@pytest.mark.parametrize(
    "value", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"]
)
def test_a_row_that_is_not_finite_is_nan_throughout(isa, value, format):
    """A NaN or infinity turns its row's scale and all its codes to NaN, and no other row's."""
    x = np.ones((3, 67), np.float32)
    x[1, 40] = value
    codes, scale = pk.quantize_rows_f8(x, format)
    values = pk.decode_f8(codes, format)
    assert np.isnan(scale).tolist() == [False, True, False]
    assert np.isnan(values[1]).all()
    assert not np.signbit(values[1]).any()
    assert (values[[0, 2]] == FORMATS[format][1]).all()


@each_format
@pytest.mark.parametrize("one", [False, True], ids=["a scale a row", "one scale"])
def test_rows_with_given_scales_are_encoded_each_by_itself(isa, format, one):
    """Many rows on several threads give what each gives alone; a NaN scale gives NaN codes."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((90, 700), np.float32)
    scale = rng.uniform(0.001, 0.1, 1 if one else 90).astype(np.float32)
    scale[0] = np.float32(0.01) if one else np.nan
    codes = np.empty(x.shape, np.uint8)
    pointers = [array.ctypes.data for array in (x, scale, codes)]
    number = list(FORMATS).index(format)
    strides = [700, 0 if one else 1, 700]
    operands = [v for pair in zip(pointers, strides, strict=True) for v in pair]
    check(library().pk_encode_rows_f8(None, number, *x.shape, *operands))
    wanted = [
        pk.encode_f8(row, float(s), format) for row, s in zip(x, np.resize(scale, 90), strict=True)
    ]
    np.testing.assert_array_equal(codes, wanted)
    scale[-1] = 0
    with pytest.raises(ValueError, match="scale"):
        check(library().pk_encode_rows_f8(None, number, *x.shape, *operands))
