"""Rows of a quantized table, under every instruction set."""

import ml_dtypes
import numpy as np
import pytest

import policy_kernels

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def table(dtype, rows, width):
    codes = np.random.default_rng(rows + width).integers(0, 256, (rows, width), np.uint8)
    return codes.view(np.int8 if dtype == "int8" else getattr(ml_dtypes, dtype))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [0, 1, 31, 64, 1000])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("target", DTYPES)
def test_rows_are_codes_times_scale(target, dtype, width):
    """Each row is its codes times its scale in float32, rounded once, for ids of any shape."""
    codes = table(dtype, 50, width)
    scale = np.random.default_rng(1).uniform(0.01, 2, 50).astype(np.float32)
    for shape in ((), (0,), (7,), (3, 5), (400,)):
        ids = np.random.default_rng(2).integers(0, 50, shape)
        y = policy_kernels.dequantize_rows(codes, scale, ids, target)
        with np.errstate(invalid="ignore", over="ignore"):
            wide = codes[ids].astype(np.float32) * scale[ids][..., None]
            wanted = wide.astype(DTYPES[target])
        packed = policy_kernels.dequantize_rows(policy_kernels.pack(codes), scale, ids, target)
        assert np.array_equal(packed.view(np.uint8), y.view(np.uint8))
        assert y.shape == (*shape, width)
        assert np.array_equal(y.astype(np.float32), wanted.astype(np.float32), equal_nan=True)


@pytest.mark.usefixtures("isa")
def test_one_scale_for_all():
    """A single scale serves the whole table, and rows may lie apart in memory."""
    codes = table("int8", 20, 64)[::2, :40]
    ids = np.arange(10)
    y = policy_kernels.dequantize_rows(codes, 0.5, ids)
    assert np.array_equal(y, codes.astype(np.float32) * np.float32(0.5))


@pytest.mark.parametrize("bad", [-1, 20, 2**62, -(2**62)])
def test_id_out_of_range_is_refused(bad):
    """An id outside the table is named, and nothing outside the table is read."""
    ids = np.array([0, 3, bad])
    with pytest.raises(ValueError, match=rf"ids\[2\]={bad}"):
        policy_kernels.dequantize_rows(table("int8", 20, 4), 1.0, ids)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"codes": np.ones((2, 3))}, TypeError, "expected codes to be"),
        ({"codes": np.ones(3, np.int8)}, ValueError, "expected codes to have shape"),
        ({"scale": np.ones(3, np.float32)}, ValueError, "expected scale"),
        ({"scale": np.ones(2)}, TypeError, "expected scale"),
        ({"ids": np.zeros(2, np.int32)}, TypeError, "expected ids"),
        ({"ids": [0]}, TypeError, "expected ids"),
        ({"dtype": "float64"}, ValueError, "expected dtype"),
    ],
)
def test_bad_arguments_are_refused(change, error, said):
    """Each wrong argument is named with what was expected."""
    good = {
        "codes": table("int8", 2, 3),
        "scale": np.ones(2, np.float32),
        "ids": np.zeros(1, np.int64),
        "dtype": "float32",
    }
    policy_kernels.dequantize_rows(**good)
    with pytest.raises(error, match=said):
        policy_kernels.dequantize_rows(**{**good, **change})
