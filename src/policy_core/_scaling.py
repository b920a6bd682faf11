"""Scales, codes and amax histories: each formula once, over a small namespace of array functions.

Everywhere `x ≈ codes * scale`, with `scale` float32, strictly positive and finite; but a block
that holds a NaN or an infinity has the scale NaN, so that its products are NaN and nothing else's.
The numbers are explained in docs/numerics.md.
"""

from typing import Any, NamedTuple, Protocol

from ._dtypes import DTYPES

FLOOR = 2.0**-100
"""`amax` is raised to this before any division, so no scale is 0, subnormal or infinite."""


class Ops(Protocol):
    """The array functions that the formulas need; every adapter has them in its `_ops.py`.

    All take and give the framework's arrays, broadcast as numpy does, and keep float32 in float32.
    """

    def cast(self, x: Any, dtype: str) -> Any:
        """Gives `x` in another dtype, rounding to nearest even; a plain cast."""

    def amax(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Gives the maximum of `|x|` over axes, which stay with size 1; 0 over no elements.

        A NaN anywhere gives NaN.
        """

    def maximum(self, x: Any, y: Any) -> Any:
        """Gives the larger of two, element by element; NaN if either is NaN."""

    def clip(self, x: Any, low: float, high: float) -> Any:
        """Gives `x` limited to a range; NaN stays NaN."""

    def rint(self, x: Any) -> Any:
        """Gives `x` rounded to integers, halves to even."""

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Gives `x` where the condition holds, else `y`."""

    def isfinite(self, x: Any) -> Any:
        """Says which elements are neither NaN nor infinite."""

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        """Gives a float32 array of one value."""

    def prepend(self, first: Any, rest: Any) -> Any:
        """Gives a 1-D array: a scalar, then all but the last of `rest`."""


class AmaxState(NamedTuple):
    """The delayed-scaling state of one tensor role (input, weight or output gradient).

    Attributes:
        scale: float32 scalar, positive and finite; 1 before any training call.
        amax_history: float32 of shape (length,), the newest first; 0 where nothing was recorded.
    """

    scale: Any
    amax_history: Any


def amax(ops: Ops, x: Any, axes: tuple[int, ...]) -> Any:
    """Gives the float32 maximum of `|x|` over `axes`, which stay with size 1."""
    return ops.amax(ops.cast(x, "float32"), axes)


def scale_of(ops: Ops, amax: Any, dtype: str) -> Any:
    """Gives the scale with which `amax` becomes the largest code of `dtype`; NaN if not finite."""
    return _raised(ops, amax) / _float32(ops, DTYPES[dtype].max)


def quantize(ops: Ops, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Gives the codes of `x` and their scales, from the values at hand.

    Args:
        ops: The framework's array functions.
        x: Floats of any dtype and shape.
        dtype: `"int8"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
        axes: The axes over which elements share a scale.

    Returns:
        Codes of `dtype` and the shape of `x`, and float32 scales in which `axes` have size 1.
    """
    x = ops.cast(x, "float32")
    largest = ops.amax(x, axes)
    scale = scale_of(ops, largest, dtype)
    if dtype != "int8":
        return encode(ops, x, scale, dtype), scale
    inverse = _float32(ops, 127.0) / _raised(ops, largest)
    codes = ops.clip(ops.rint(x * inverse), -127.0, 127.0)
    # An integer cannot be NaN; the scale is, and that is enough.
    return ops.cast(ops.where(ops.isfinite(inverse), codes, 0.0), "int8"), scale


def encode(ops: Ops, x: Any, scale: Any, dtype: str) -> Any:
    """Gives the float8 codes of `x` under a given scale; what is too large saturates."""
    largest = DTYPES[dtype].max
    return ops.cast(ops.clip(ops.cast(x, "float32") / scale, -largest, largest), dtype)


def dequantize(ops: Ops, codes: Any, scale: Any, dtype: str) -> Any:
    """Gives `codes * scale`, computed in float32, in `dtype`."""
    return ops.cast(ops.cast(codes, "float32") * scale, dtype)


def initial_state(ops: Ops, length: int) -> AmaxState:
    """Gives the state before any training call, with a history of `length` zeros."""
    return AmaxState(ops.full((), 1.0), ops.full((length,), 0.0))


def training_scale(ops: Ops, state: AmaxState, amax_now: Any, dtype: str) -> tuple[Any, AmaxState]:
    """Gives the scale for a training call with at least one row, and the state after it.

    Args:
        ops: The framework's array functions.
        state: The state before the call.
        amax_now: float32 scalar, the amax of the tensor at hand.
        dtype: The float8 format of the codes.
    """
    peak = ops.amax(state.amax_history, (0,))[0]
    scale = scale_of(ops, ops.where(peak > 0, peak, amax_now), dtype)
    # An amax that is not finite shows in the output, and must not poison the calls after it.
    seen = ops.isfinite(amax_now)
    history = ops.where(seen, ops.prepend(amax_now, state.amax_history), state.amax_history)
    return scale, AmaxState(ops.where(ops.isfinite(scale), scale, state.scale), history)


def inference_scale(ops: Ops, state: AmaxState, amax_now: Any, dtype: str) -> Any:
    """Gives the scale for a call outside training.

    It is the stored one, or, before any training call, that of the amax at hand.
    """
    peak = ops.amax(state.amax_history, (0,))[0]
    return ops.where(peak > 0, state.scale, scale_of(ops, amax_now, dtype))


def _raised(ops: Ops, amax: Any) -> Any:
    return ops.where(ops.isfinite(amax), ops.maximum(amax, _float32(ops, FLOOR)), float("nan"))


def _float32(ops: Ops, value: float) -> Any:
    return ops.full((), value)
