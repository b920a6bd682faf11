"""Wrapped equinox layers: values, as equinox's are, around the plain layer without its weight."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from policy_core import DTypePolicy
from policy_core._backend import Wrapping
from policy_core._forms import OUT_IN, Axes, as_they_are
from policy_core._plan import LayerKind, TensorSpec

from . import _kernels, _layers
from ._forms import patches, stacked
from ._ops import Array, numpy_dtype
from ._states import Cell


@dataclasses.dataclass(frozen=True)
class Form:
    """What a layer is; attributes as those of `_nnx_forms.Form`, the weight being `weight`."""

    kind: LayerKind = "other"
    axes: Axes | None = None
    arrange: Any = None
    left_out: str = ""


_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
_QUANTIZABLE = (eqx.nn.Linear, eqx.nn.Embedding, eqx.nn.Conv)


def form(layer: Any) -> Form:
    """Gives what a plain layer is."""
    plain = type(layer)
    if isinstance(layer, _NORMS):
        return Form("norm")
    base = next((base for base in _QUANTIZABLE if isinstance(layer, base)), None)
    if base is None:
        return Form()
    kind: LayerKind = "embedding" if base is eqx.nn.Embedding else "linear"
    # Equinox wraps methods anew in each class: what they wrap is the same function.
    if _function(plain.__call__) is not _function(base.__call__):
        reason = f"{plain.__name__} overrides __call__; it follows the source policy"
        return Form(kind, left_out=reason)
    ndim = layer.num_spatial_dims + 2 if base is eqx.nn.Conv else 2
    # A quantized layer has no weight of its own, nor has one inside eqx.nn.Shared.
    reason = stacked(layer.weight.shape, ndim) if eqx.is_array(layer.weight) else ""
    if reason:
        return Form(kind, left_out=reason)
    if kind == "embedding":
        return Form(kind, OUT_IN)
    if isinstance(layer, eqx.nn.Linear):
        if "scalar" in (layer.in_features, layer.out_features):
            return Form(kind, left_out="a linear layer from or to a scalar is too small to pay")
        return Form(kind, OUT_IN, as_they_are)
    return _conv(layer)


def _function(method: Any) -> Any:
    method = getattr(method, "method", method)
    return getattr(method, "__wrapped__", method)


def _conv(layer: Any) -> Form:
    n = layer.num_spatial_dims
    for name, differs in {
        "groups": layer.groups != 1,
        f"padding mode {layer.padding_mode!r}": layer.padding_mode.upper() != "ZEROS",
        f"padding {layer.padding!r}": layer.padding in ("SAME_LOWER",),
    }.items():
        if differs:
            return Form("linear", left_out=f"a convolution with {name} has no product on codes yet")
    arrange = patches(layer.kernel_size, layer.stride, layer.padding, layer.dilation)

    def channels_first(x: Array) -> Any:
        rows, _ = arrange(jnp.moveaxis(x, 0, -1))
        return rows, lambda y: jnp.moveaxis(y, -1, 0)

    return Form("linear", Axes((0,), (*range(2, n + 2), 1)), channels_first)


class PolicyLayer(eqx.Module):
    """A layer under a policy; its other attributes are the plain layer's.

    Attributes:
        layer: The plain layer; without weight and bias where it is quantized.
        tensors: The stored tensors of a quantized layer, by the names that files have.
        wrapping: What was decided for the layer.
        plain: The specs of its plain tensors.
        shape: The shape of its plain weight; `()` if it is not quantized.
        cell: Where a call in training leaves the state after it; None outside training.
    """

    layer: eqx.Module
    tensors: dict[str, Array]
    wrapping: Wrapping = eqx.field(static=True)
    plain: tuple[TensorSpec, ...] = eqx.field(static=True)
    shape: tuple[int, ...] = eqx.field(static=True, default=())
    cell: Cell | None = eqx.field(static=True, default=None)

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The layer's policy."""
        return self.wrapping.plan.policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives the layer's output under its policy; arguments as the plain layer takes them."""
        plan = self.wrapping.plan
        layer: Any = self.layer
        if not plan.autocast:
            return layer(*args, **kwargs)
        args, kwargs = _layers.cast_nest((args, kwargs), plan.compute_dtype)
        if plan.quantized:
            return self._quantized(*args, **kwargs)
        what = form(self.layer)
        inside = _layers.inside_dtype(plan, what.kind)
        args, kwargs = _layers.cast_nest((args, kwargs), inside)
        if what.arrange is as_they_are and _narrow(args, inside):
            return _wide_linear(cast_own(self.layer, inside), *args, **kwargs)
        result = cast_own(self.layer, inside)(*args, **kwargs)
        return _layers.cast_nest(result, plan.compute_dtype)

    def _quantized(self, x: Array, *, key: Any = None) -> Array:
        del key  # every equinox layer takes one; none of these needs it
        plan = self.wrapping.plan
        what = form(self.layer)
        if what.kind == "embedding":
            if not (jnp.ndim(x) == 0 and jnp.issubdtype(x.dtype, jnp.integer)):
                raise ValueError(
                    "Expected a scalar integer index, as eqx.nn.Embedding takes; use jax.vmap for "
                    f"more. Received: shape {jnp.shape(x)}, dtype {x.dtype}."
                )
            scale = self.tensors["weight_scale"]
            return _layers.embedding(self.tensors["weight"], scale, x, plan.compute_dtype)
        rows, finish = what.arrange(x)
        tensors = self.tensors if self.cell is None else {**self.tensors, **self.cell.state}
        how = _layers.recipe(plan, self.cell is not None)
        y, state = _layers.linear(how, rows, tensors)
        if self.cell is not None:
            self.cell.state = state
        return finish(y)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("layer", "tensors", "wrapping"):
            raise AttributeError(name)
        if name == "weight" and self.tensors and not self.wrapping.plan.trainable:
            raise AttributeError(
                f"This layer has no float weight any more: under {self.dtype_policy.name!r} it "
                "keeps codes in tensors['weight'] and their scales in tensors['weight_scale']. "
                "pc.unwrap gives the float layer back."
            )
        return self.tensors[name] if name in self.tensors else getattr(self.layer, name)

    def __repr__(self) -> str:
        return f"PolicyLayer({self.dtype_policy!r}, {self.layer!r})"


def _narrow(args: tuple[Any, ...], dtype: str) -> bool:
    """Says whether the input has a dtype of 16 bits; integers and complex numbers stay theirs."""
    return numpy_dtype(dtype).itemsize == 2 and bool(args) and args[0].dtype == numpy_dtype(dtype)


def _wide_linear(layer: Any, x: Array, *, key: Any = None) -> Array:
    """Gives a float linear layer's output: 16-bit products summed in float32 and rounded once."""
    del key
    y = _kernels.product(x, layer.weight)
    return (y if layer.bias is None else y + layer.bias.astype(y.dtype)).astype(x.dtype)


def cast_own(layer: Any, dtype: str) -> Any:
    """Gives a plain layer with its own float arrays cast, and the layers inside as they are."""

    def visit(value: Any) -> Any:
        return jax.tree.map(
            lambda leaf: _layers.cast_nest(leaf, dtype) if eqx.is_array(leaf) else leaf,
            value,
            is_leaf=lambda node: isinstance(node, eqx.Module),
        )

    changed = {name: visit(value) for name, value in vars(layer).items()}
    return rebuilt(layer, changed)


def rebuilt(layer: Any, attributes: dict[str, Any]) -> Any:
    """Gives a copy of a module with other attributes; its constructor does not run."""
    new = object.__new__(type(layer))
    for name, value in attributes.items():
        object.__setattr__(new, name, value)
    return new
