"""Quantized arrays for raw functions: a pytree node in the place of a weight, and its products."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import policy_core as pc
from policy_core import DTypePolicy
from policy_core._backend import Site, Step, Wrapping
from policy_core._forms import Arrange, Axes
from policy_core._plan import plan

from . import _forms, _layers, _packed, _sites
from ._forms import general
from ._ops import SHAPES, Array, numpy_dtype
from ._quantize import dequantize
from ._sites import Stored


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """A weight under a quantized policy: `x @ w`, `dot`, `einsum` and `dot_general` take it.

    Invariant, for a weight that keeps only codes:
    `dequantize() ≈ weight`, with `codes (out, in) * scale (out, 1)` in the files' shapes.

    Attributes:
        tensors: The stored tensors by the names that files have: `weight`, (out, in) codes, and
            `weight_scale`; or the float `weight` and its delayed-scaling state.
        axes: Which axes of the weight make up out and in.
        shape: The shape of the weight.
        wrapping: What was decided for it.
    """

    __array_ufunc__ = None  # numpy arrays leave `x @ w` to it

    def __init__(
        self, tensors: dict[str, Array], axes: Axes, shape: tuple[int, ...], wrapping: Wrapping
    ) -> None:
        self.tensors = tensors
        self.axes = axes
        self.shape = shape
        self.wrapping = wrapping

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Gives the tensors as children, sorted by name."""
        names = tuple(sorted(self.tensors))
        children = [(jax.tree_util.DictKey(name), self.tensors[name]) for name in names]
        return children, (names, self.axes, self.shape, self.wrapping)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "QuantizedArray":
        """Gives the node back."""
        names, *rest = aux
        return cls(dict(zip(names, children, strict=True)), *rest)

    @property
    def ndim(self) -> int:
        """How many axes the weight has."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of its products."""
        return numpy_dtype(self.wrapping.plan.compute_dtype)

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The weight's policy."""
        return self.wrapping.plan.policy

    def dequantize(self) -> Array:
        """Gives the weight as floats, in its own shape and the variable dtype."""
        made, weight = self.wrapping.plan, self.tensors["weight"]
        if not made.trainable:
            if _packed.is_packed(weight):
                shape = self.axes.file_shape(self.shape)
                weight = _packed.unpacked_inside(weight, shape, str(made.weight_codes))
            weight = dequantize(weight, self.tensors["weight_scale"], made.variable_dtype)
        return self.axes.from_file(SHAPES, weight, self.shape)

    def __rmatmul__(self, x: Any) -> Array:
        if self.ndim != 2:
            raise ValueError(
                f"x @ w needs a weight of two axes. Received shape {self.shape}; use "
                "policy_jax.dot_general or policy_jax.einsum."
            )
        return dot(x, self)

    def __matmul__(self, other: Any) -> Array:
        raise TypeError(
            "A quantized weight is the right operand of a product: x @ w. To use its values, take "
            "w.dequantize()."
        )

    def __repr__(self) -> str:
        return f"QuantizedArray(shape={self.shape}, {self.dtype_policy!r})"


def quantize_array(
    weight: Any, policy: Any, contracted_axes: Sequence[int] = (0,)
) -> QuantizedArray:
    """Gives a weight under a quantized policy.

    Args:
        weight: Floats; for `x @ w` of shape (in, out).
        policy: A quantized policy, or its name.
        contracted_axes: The axes of the weight that products sum over.

    Raises:
        ValueError: The policy is not quantized, the weight is no float, or holds a NaN or an
            infinity, or it has no such axes.
        NoKernelError: The mode has no kernel yet.
    """
    weight = jnp.asarray(weight)
    contracted = tuple(
        sorted({a + weight.ndim if a < 0 else a for a in contracted_axes} & {*range(weight.ndim)})
    )
    if not contracted or len(contracted) < len(contracted_axes):
        raise ValueError(
            f"Expected different axes of a weight of shape {weight.shape} in contracted_axes. "
            f"Received: {tuple(contracted_axes)}."
        )
    axes = Axes(tuple(a for a in range(weight.ndim) if a not in contracted), contracted)
    stored = Stored(weight, axes)
    spec = _sites.layer_spec("", "Array", "linear", {"weight": stored}, None, "")
    made = plan(pc.get(policy), spec)
    if not made.quantized:
        reason = f": {made.note}" if made.asked.quantization is not None else ""
        raise ValueError(f"Expected a quantized policy. Received: {made.asked.name!r}{reason}.")
    site = Site(paths=("",), layer=weight, spec=spec, tensors={"weight": stored})
    wrapping = Wrapping(plan=made, bytes_before=int(weight.nbytes))
    step = Step(site=site, wrapping=wrapping)
    _sites.validate(step)
    return QuantizedArray(_sites.made(step, made), axes, tuple(weight.shape), wrapping)


def dot(x: Any, w: Any) -> Array:
    """Gives `jnp.dot(x, w)`: over the last axis of `x` and, for two axes or more, the last but one
    of `w`; for a quantized `w` of two axes on its codes.
    """
    if not isinstance(w, QuantizedArray):
        return jnp.dot(x, w)
    return dot_general(x, w, (((jnp.ndim(x) - 1,), (w.ndim - 2,)), ((), ())))


def einsum(equation: str, x: Any, w: Any) -> Array:
    """Gives `jnp.einsum(equation, x, w)`, for a quantized `w` on its codes.

    Raises:
        ValueError: `w` is quantized, and the equation is no plain product of an input and a
            weight, or sums other axes of `w` than those that share its scales.
    """
    if not isinstance(w, QuantizedArray):
        return jnp.einsum(equation, x, w)
    parsed = _forms.equation(equation)
    _check_axes(w, parsed.axes, equation)
    return _product(x, w, parsed.arrange(SHAPES, tuple(w.shape[axis] for axis in w.axes.out)))


def dot_general(
    x: Any,
    w: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **kwargs: Any,
) -> Array:
    """Gives `jax.lax.dot_general(x, w, …)`, for a quantized `w` on its codes.

    Args:
        x: Floats.
        w: Floats, or a QuantizedArray, whose product is in its policy's compute dtype.
        dimension_numbers: As `jax.lax.dot_general` takes them; without batch axes for a
            quantized `w`.
        precision: For floats.
        preferred_element_type: For floats.
        kwargs: More of `jax.lax.dot_general`'s, for floats.

    Raises:
        ValueError: `w` is quantized, and there are batch axes, or other axes of `w` are summed
            than those that share its scales.
    """
    if not isinstance(w, QuantizedArray):
        return jax.lax.dot_general(
            x, w, dimension_numbers, precision, preferred_element_type, **kwargs
        )
    (x_axes, w_axes), batch = dimension_numbers
    if jnp.ndim(x) == 0:
        raise ValueError("A product with a quantized weight needs an input of one axis or more.")
    if any(len(axes) for axes in batch):
        raise ValueError(f"A quantized weight has no batch axes. Received: {batch!r}.")
    # Pairs in the weight's own order, which is that of the stored codes.
    pairs = sorted(zip(w_axes, x_axes, strict=True))
    _check_axes(w, Axes(w.axes.out, tuple(axis for axis, _ in pairs)), f"axes {tuple(w_axes)}")
    summed = tuple(axis % jnp.ndim(x) for _, axis in pairs)
    out_shape = tuple(w.shape[axis] for axis in w.axes.out)
    if tuple(sorted(summed)) != summed:
        x = jnp.moveaxis(x, summed, tuple(range(-len(summed), 0)))
        summed = tuple(range(x.ndim - len(summed), x.ndim))
    return _product(x, w, general(summed, out_shape))


def training_dot(x: Any, w: QuantizedArray) -> tuple[Array, QuantizedArray]:
    """Gives `dot(x, w)` as a call in training, and the weight with its float8 state after it."""
    rows, finish = general((-1,), tuple(w.shape[axis] for axis in w.axes.out))(jnp.asarray(x))
    made = w.wrapping.plan
    how = _layers.recipe(made, True)
    y, state = _layers.linear(how, _layers.cast_nest(rows, made.compute_dtype), w.tensors)
    return finish(y), QuantizedArray({**w.tensors, **state}, w.axes, w.shape, w.wrapping)


def dot_general_cls(policy: Any) -> Callable[[], Callable[..., Array]]:
    """Gives what flax layers take as `dot_general_cls`: float weights, quantized in each call.

    Args:
        policy: One of mode `float8/dynamic`, which trains without a state of its own. For the
            other modes wrap the model.

    Raises:
        ValueError: The policy is of another mode.
    """
    policy = pc.get(policy)
    mode = policy.quantization
    if mode is None or not mode.scheme.trainable or mode.scheme.delayed:
        raise ValueError(
            f"Expected a policy of mode 'float8/dynamic'. Received: {policy.name!r}; it needs "
            "stored codes or a state: use pc.wrap on the model."
        )

    def quantized_dot_general(x: Any, w: Any, dimension_numbers: Any, **kwargs: Any) -> Array:
        kwargs.pop("precision", None)
        (_, w_axes), _ = dimension_numbers
        return dot_general(x, quantize_array(w, policy, w_axes), dimension_numbers, **kwargs)

    return lambda: quantized_dot_general


def _check_axes(w: QuantizedArray, axes: Axes, said: str) -> None:
    if axes != w.axes:
        raise ValueError(
            f"The weight shares scales over its axes {w.axes.contracted}, which a product must sum "
            f"over. Received: {said!r}. Quantize it with contracted_axes={axes.contracted}."
        )


def _product(x: Any, w: QuantizedArray, arrange: Arrange) -> Array:
    made = w.wrapping.plan
    x = _layers.cast_nest(jnp.asarray(x), made.compute_dtype)
    rows, finish = arrange(x)
    y, _ = _layers.linear(_layers.recipe(made), rows, w.tensors)
    return finish(y)
