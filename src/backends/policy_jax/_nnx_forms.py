"""What the known layers of flax nnx are: their kind, their weight's axes, how they take rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes as nnx_dtypes

from policy_core._forms import IN_OUT, OUT_IN, Arrange, Axes, as_they_are
from policy_core._plan import LayerKind

from . import _forms
from ._forms import general, patches, stacked
from ._ops import SHAPES


@dataclass(frozen=True)
class Form:
    """What a layer is.

    Attributes:
        kind: How it could be quantized, if at all.
        weight: The attribute that holds the weight; `""` if there is none to quantize.
        axes: How the weight becomes (out, in); None for a table of rows.
        arrange: How inputs become rows.
        left_out: Why the layer can't be quantized; `""` if it can.
    """

    kind: LayerKind = "other"
    weight: str = ""
    axes: Axes | None = None
    arrange: Arrange | None = None
    left_out: str = ""


_NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm)
# The names that files and other frameworks have for the same tensors.
FILE_NAMES: dict[Any, dict[str, str]] = {
    **{key: {"scale": "weight", "mean": "running_mean", "var": "running_var"} for key in _NORMS},
    nnx.Embed: {"embedding": "weight"},
}
_LINEAR = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)


def known_base(plain: type) -> type | None:
    """Gives the known class that a layer's class is or extends."""
    known = (*_LINEAR, nnx.Embed, *_NORMS)
    return next((base for base in plain.__mro__ if base in known), None)


def form(layer: Any, plain: type) -> Form:
    """Gives what a layer is, from its plain class and its attributes."""
    base = known_base(plain)
    if base is None:
        return Form()
    if base in _NORMS:
        return Form("norm")
    if plain.__call__ is not base.__call__:
        kind: LayerKind = "embedding" if base is nnx.Embed else "linear"
        reason = f"{plain.__name__} overrides __call__; it follows the source policy"
        return Form(kind, left_out=reason)
    if base is nnx.Embed:
        reason = _stacked(layer, "embedding", 2)
        what = Form("embedding", "embedding", OUT_IN)
        return Form("embedding", left_out=reason) if reason else what
    reason = _own_functions(layer) or _stacked(layer, "kernel", _weight_axes(layer))
    if reason:
        return Form("linear", left_out=reason)
    if base is nnx.Conv:
        return convolution(layer, tuple(layer.kernel_size))
    forms: dict[Any, Callable[[Any], Form]] = {
        nnx.Linear: _linear,
        nnx.LinearGeneral: _linear_general,
        nnx.Einsum: _einsum,
    }
    return forms[base](layer)


def _stacked(layer: Any, name: str, ndim: int) -> str:
    # A quantized layer has no such variable.
    weight = getattr(layer, name, None)
    return "" if weight is None else stacked(weight.get_value().shape, ndim)


def _weight_axes(layer: Any) -> int:
    """Gives how many axes the kernel of one layer has."""
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    if isinstance(layer, nnx.Einsum):
        return len(layer.kernel_shape)
    return len(layer.kernel_size) + 2 if isinstance(layer, nnx.Conv) else 2


def _own_functions(layer: Any) -> str:
    """Says which function of its own a layer computes with, that a product on codes would skip."""
    usual = {
        "dot_general": (None, jax.lax.dot_general),
        "dot_general_cls": (None,),
        "einsum_op": (jax.numpy.einsum,),
        "conv_general_dilated": (jax.lax.conv_general_dilated,),
        "promote_dtype": (nnx_dtypes.promote_dtype,),
    }
    for name, values in usual.items():
        given = getattr(layer, name, values[0])
        if not any(given is value for value in values):
            return f"it computes with a {name} of its own"
    return ""


def _linear(layer: nnx.Linear) -> Form:
    return Form("linear", "kernel", IN_OUT, as_they_are)


def _linear_general(layer: nnx.LinearGeneral) -> Form:
    if layer.batch_axis:
        return Form("linear", left_out="its weight has batch axes")
    n, total = len(layer.in_features), len(layer.in_features) + len(layer.out_features)
    axes = Axes(tuple(range(n, total)), tuple(range(n)))
    return Form("linear", "kernel", axes, general(layer.axis, layer.out_features))


def _einsum(layer: nnx.Einsum) -> Form:
    try:
        equation = _forms.equation(layer.einsum_str)
    except ValueError as error:
        return Form("linear", left_out=str(error))
    out_shape = tuple(layer.kernel_shape[axis] for axis in equation.axes.out)
    if layer.bias_shape is not None and math.prod(layer.bias_shape) != math.prod(out_shape):
        return Form("linear", left_out="its bias is broadcast over the weight's axes")
    return Form("linear", "kernel", equation.axes, equation.arrange(SHAPES, out_shape))


def convolution(layer: Any, kernel_size: tuple[int, ...]) -> Form:
    """Gives what a flax convolution is; nnx and linen name its options alike."""
    n = len(kernel_size)
    strides, dilation = _each(layer.strides, n), _each(layer.kernel_dilation, n)
    padding = layer.padding
    if isinstance(padding, int):
        padding = ((padding, padding),) * n
    elif not isinstance(padding, str):
        padding = tuple((p, p) if isinstance(p, int) else tuple(p) for p in padding)
    for name, differs in {
        "feature groups": layer.feature_group_count != 1,
        "a mask": layer.mask is not None,
        "input dilation": set(_each(layer.input_dilation, n)) != {1},
        f"padding {padding!r}": isinstance(padding, str) and padding not in ("SAME", "VALID"),
    }.items():
        if differs:
            return Form("linear", left_out=f"a convolution with {name} has no product on codes yet")
    axes = Axes((n + 1,), tuple(range(n + 1)))
    arrange = patches(kernel_size, strides, padding, dilation)
    return Form("linear", "kernel", axes, arrange)


def _each(value: Any, n: int) -> tuple[int, ...]:
    return (value or 1,) * n if value is None or isinstance(value, int) else tuple(value)
