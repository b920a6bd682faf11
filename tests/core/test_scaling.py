"""Scales and amax histories, on numpy's side of the formulas."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from policy_core import _scaling
from policy_core._dtypes import DTYPES
from policy_core._scaling import FLOOR, AmaxState
from policy_numpy import dequantize, encode, quantize
from policy_numpy._ops import OPS

E4M3 = "float8_e4m3fn"
CODES = ("int8", E4M3, "float8_e5m2")

finite = st.floats(-(2.0**127), 2.0**127, width=32)
arrays = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=finite
)


def scalar(value: float) -> np.ndarray:
    return np.full((), value, np.float32)


def history(*values: float) -> AmaxState:
    return AmaxState(scalar(1.0), np.array(values, np.float32))


@pytest.mark.parametrize("dtype", CODES)
@given(x=arrays)
def test_error_is_at_most_half_a_step(dtype: str, x: np.ndarray) -> None:
    """Dequantized codes are within half a step of the value, or of half the smallest code."""
    codes, scale = quantize(x, dtype, (1,))
    error = np.abs(dequantize(codes, scale).astype(np.float64) - x)
    mantissa = {"int8": 0, E4M3: 3, "float8_e5m2": 2}[dtype]
    smallest = {"int8": 1.0, E4M3: 2.0**-9, "float8_e5m2": 2.0**-16}[dtype]
    relative = 0 if dtype == "int8" else np.abs(x) * 2.0 ** -(mantissa + 1)
    assert (error <= np.maximum(relative, smallest * scale / 2) * 1.0001).all()


@given(x=arrays, row=st.integers(0, 7))
def test_rows_are_quantized_alone(x: np.ndarray, row: int) -> None:
    """A batch and a loop over its rows give the same codes and scales."""
    row %= len(x)
    codes, scale = quantize(x, "int8", (1,))
    alone_codes, alone_scale = quantize(x[row : row + 1], "int8", (1,))
    assert np.array_equal(codes[row : row + 1], alone_codes)
    assert np.array_equal(scale[row : row + 1], alone_scale)


def test_blocks_of_rows_change_nothing() -> None:
    """A weight larger than a block has the codes that its rows have alone."""
    x = np.random.default_rng(0).standard_normal((300, 700), np.float32)
    codes, scale = quantize(x, "int8", (1,))
    wanted = [quantize(row[None], "int8", (1,)) for row in x]
    assert np.array_equal(codes, np.concatenate([c for c, _ in wanted]))
    assert np.array_equal(scale, np.concatenate([s for _, s in wanted]))


def test_int8_rounds_half_to_even() -> None:
    """Halves go to the even code, and -128 is never used."""
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 127, -127]], np.float32)
    codes, scale = quantize(x, "int8", (1,))
    assert codes.tolist() == [[0, 2, 2, 0, -2, 127, -127]]
    assert scale.item() == 1


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, 1e-38, 1e-31])
@pytest.mark.parametrize("dtype", CODES)
def test_tiny_amax_is_raised_to_the_floor(amax: float, dtype: str) -> None:
    """Below the floor the scale is that of the floor, never 0 or subnormal."""
    scale = _scaling.scale_of(OPS, scalar(amax), dtype)
    assert scale == np.float32(FLOOR) / np.float32(DTYPES[dtype].max)
    assert scale >= np.finfo(np.float32).smallest_normal


def test_overflow_saturates() -> None:
    """Values above the largest code become it, as ml_dtypes' own cast does not."""
    x = np.array([1000, -1000, 464, 465, 448, np.inf, -np.inf, np.nan], np.float32)
    codes = encode(x, scalar(1.0), E4M3).astype(np.float32)
    assert codes[:7].tolist() == [448, -448, 448, 448, 448, 448, -448]
    assert np.isnan(codes[7])
    assert np.isnan(np.float32(1000).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_first_training_call_takes_the_amax_at_hand() -> None:
    """Before any history the scale is that of this very tensor, and the amax is recorded."""
    scale, state = _scaling.training_scale(OPS, _scaling.initial_state(OPS, 4), scalar(896.0), E4M3)
    assert scale == 2
    assert state.scale == 2
    assert state.amax_history.tolist() == [896, 0, 0, 0]


def test_later_calls_take_the_largest_of_the_history() -> None:
    """The scale comes from earlier calls alone; this call's amax acts at the next."""
    scale, state = _scaling.training_scale(OPS, history(448, 896, 0), scalar(4480.0), E4M3)
    assert scale == 2
    assert state.amax_history.tolist() == [4480, 448, 896]
    scale, _ = _scaling.training_scale(OPS, state, scalar(1.0), E4M3)
    assert scale == 10


@pytest.mark.parametrize("amax", [np.nan, np.inf])
def test_amax_that_is_not_finite_is_not_recorded(amax: float) -> None:
    """A bad step leaves history and scale fit for the next one."""
    scale, state = _scaling.training_scale(OPS, history(448, 0), scalar(amax), E4M3)
    assert scale == 1
    assert state.amax_history.tolist() == [448, 0]
    scale, state = _scaling.training_scale(OPS, _scaling.initial_state(OPS, 2), scalar(amax), E4M3)
    assert np.isnan(scale)
    assert state.scale == 1
    assert state.amax_history.tolist() == [0, 0]


def test_inference_takes_the_stored_scale() -> None:
    """Outside training the stored scale serves; before any training, the amax at hand."""
    stored = AmaxState(scalar(3.0), np.array([7, 0], np.float32))
    assert _scaling.inference_scale(OPS, stored, scalar(9.0), E4M3) == 3
    fresh = _scaling.initial_state(OPS, 2)
    assert _scaling.inference_scale(OPS, fresh, scalar(896.0), E4M3) == 2


@given(st.lists(st.floats(0, 2**40, width=32), min_size=1, max_size=12), st.integers(1, 5))
def test_history_holds_the_newest_first(values: list[float], length: int) -> None:
    """After any calls the history holds their amax values, newest first, and no more."""
    state = _scaling.initial_state(OPS, length)
    for value in values:
        _, state = _scaling.training_scale(OPS, state, scalar(value), E4M3)
    wanted = ([*values[::-1]] + [0.0] * length)[:length]
    assert state.amax_history.tolist() == wanted
    assert state.scale > 0
