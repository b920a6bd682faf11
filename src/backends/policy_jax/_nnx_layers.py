"""Wrapped flax nnx layers: the same objects, of a class that computes as their plan says."""

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from flax.nnx import reprlib

from policy_core import DTypePolicy
from policy_core._backend import Wrapping
from policy_core._plan import TensorSpec

from . import _kernels, _layers
from ._nnx_forms import form
from ._ops import Array, numpy_dtype
from ._sites import Stored


class Codes(nnx.Variable):
    """Codes and scales of a quantized weight: no Param, so that no optimizer takes them."""


class Float8State(nnx.Variable):
    """The delayed-scaling state of an input or a weight, updated by calls in training."""


class Float8GradientState(Float8State):
    """The delayed-scaling state of an output gradient, which only a gradient can update.

    Differentiate with respect to it too, and give what comes to `policy_jax.apply_gradient_state`.
    """


class PolicyModule:
    """What a wrapped layer's class has besides its plain one."""

    __slots__ = ()

    _policy_class: Any
    _policy_wrapping: Wrapping
    # The specs of the plain tensors; the shape and metadata of the weight's Param.
    _policy_plain: tuple[tuple[TensorSpec, ...], tuple[int, ...], tuple[tuple[str, Any], ...]]

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The layer's policy."""
        return self._policy_wrapping.plan.policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives the layer's output under its policy."""
        plan = self._policy_wrapping.plan
        if not plan.autocast:
            return self._policy_class.__call__(self, *args, **kwargs)
        if not plan.quantized:
            return _float_call(self, "__call__", args, kwargs)
        args, kwargs = _layers.cast_nest((args, kwargs), plan.compute_dtype)
        what = form(self, self._policy_class)
        if what.kind == "embedding":
            return _embedding(self, *args, **kwargs)
        return _linear(self, what.arrange, *args, **kwargs)

    def __nnx_repr__(self) -> Iterator[Any]:
        lines = iter(self._policy_class.__nnx_repr__(self))
        yield next(lines)
        yield reprlib.Attr("dtype_policy", self.dtype_policy)
        yield from lines

    def __getattr__(self, name: str) -> Any:
        if name in ("kernel", "embedding") and "_policy_wrapping" in vars(self):
            raise AttributeError(
                f"This layer has no float {name!r} any more: under {self.dtype_policy.name!r} it "
                "keeps int8 or float8 codes in 'weight' and their scales in 'weight_scale'. "
                "pc.unwrap gives the float layer back."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> Any:
        return _new, (self._policy_class,), self.__getstate__()


class PolicyEmbed(PolicyModule):
    """A wrapped `nnx.Embed`, whose table serves as the last layer's weight too."""

    __slots__ = ()

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        """Gives the product of queries with every row of the table, under the policy."""
        plan = self._policy_wrapping.plan
        if not plan.autocast:
            return self._policy_class.attend(self, query, out_sharding)
        if not plan.quantized:
            return _float_call(self, "attend", (query, out_sharding), {})
        query = _layers.cast_nest(query, plan.compute_dtype)
        codes, scale = self.weight[...], self.weight_scale[...]
        y = _kernels.linear_weight_only(query, codes, scale.reshape(-1), None)
        return _placed(y.astype(numpy_dtype(plan.compute_dtype)), out_sharding)


@functools.cache
def wrapped_class(plain: type) -> type:
    """Gives the class of a wrapped layer for its plain class."""
    extra = PolicyEmbed if issubclass(plain, nnx.Embed) else PolicyModule
    # Python lets an object change into a class only if its first base is the object's own. So the
    # mixin comes second, and its members are named, to come before the plain class's.
    members = {
        **dict(_members(extra)),
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_policy_class": plain,
    }
    return types.new_class(plain.__name__, (plain, extra), {}, lambda space: space.update(members))


def _members(extra: type) -> Iterator[tuple[str, Any]]:
    inherited = {"__module__", "__qualname__", "__doc__", "__annotations__", "__slots__"}
    for base in reversed(extra.__mro__[:-1]):
        yield from ((k, v) for k, v in vars(base).items() if k not in inherited)


def plain_class(layer: Any) -> type:
    """Gives a layer's class as if it were not wrapped."""
    return layer._policy_class if isinstance(layer, PolicyModule) else type(layer)


def _new(plain: type) -> Any:
    """Gives an empty wrapped layer, for pickles: a class made at run time has no importable name."""
    return object.__new__(wrapped_class(plain))


def quantized_tensors(layer: Any) -> dict[str, Stored]:
    """Gives the tensors of a quantized layer by the names that files have."""
    what = form(layer, layer._policy_class)
    plan = layer._policy_wrapping.plan
    tensors: dict[str, Stored] = {}
    for spec in plan.storage:
        if spec.name == "weight" and plan.trainable:
            tensors["weight"] = Stored(getattr(layer, what.weight), what.axes)
        else:
            flat = spec.name == "bias"
            tensors[spec.name] = Stored(getattr(layer, spec.name), None, flat, spec)
    return tensors


def _linear(layer: Any, arrange: Any, inputs: Array, *rest: Any, **kwargs: Any) -> Array:
    out_sharding = kwargs.pop("out_sharding", rest[-1] if rest else None)
    if kwargs or any(value is not None for value in rest):
        raise TypeError(
            f"A quantized {layer._policy_class.__name__} takes its input alone. Received: "
            f"{len(rest)} more arguments, and {sorted(kwargs)}."
        )
    plan = layer._policy_wrapping.plan
    training = plan.delayed and plan.trainable and not layer.use_running_average
    how = _layers.recipe(plan, training)
    rows, finish = arrange(inputs)
    tensors = quantized_tensors(layer)
    y, state = _layers.linear(how, rows, {name: _operand(t) for name, t in tensors.items()})
    if training and rows.size:
        for name, value in state.items():
            getattr(layer, name).set_value(value)
    return _placed(finish(y), out_sharding)


def _operand(tensor: Stored) -> Array:
    """Gives a tensor in the form that products take: packed codes as they are."""
    return tensor.read() if tensor.codes is None else tensor.array


def _embedding(layer: Any, inputs: Array, out_sharding: Any = None) -> Array:
    if not jax.numpy.issubdtype(inputs.dtype, jax.numpy.integer):
        raise ValueError(f"Expected integer ids. Received dtype {inputs.dtype}.")
    plan = layer._policy_wrapping.plan
    codes, scale = layer.weight[...], layer.weight_scale[...]
    y = _layers.embedding(codes, scale, inputs, plan.compute_dtype)
    return _placed(y, out_sharding)


def _placed(y: Array, out_sharding: Any) -> Array:
    # Products are spread as their operands are, not as flax would have a dot do it.
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _float_call(layer: Any, method: str, args: Any, kwargs: Any) -> Any:
    """Calls a plain layer's method with inputs and parameters in the compute dtype."""
    plan = layer._policy_wrapping.plan
    plain = layer._policy_class
    inside = _layers.inside_dtype(plan, form(layer, plain).kind)
    # Among the arguments may be what is no array, such as a sharding.
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves((args, kwargs))]
    is_complex = any(
        d is not None and jax.numpy.issubdtype(d, jax.numpy.complexfloating) for d in dtypes
    )
    view, given = _cast_view(layer, plain, inside, is_complex)
    # Inputs arrive in the compute dtype first: a norm sees what the layers around it see.
    args, kwargs = _layers.cast_nest((args, kwargs), plan.compute_dtype)
    args, kwargs = _layers.cast_nest((args, kwargs), inside)
    result = getattr(view, method)(*args, **kwargs)
    for name, value in vars(view).items():
        if name not in given or value is not given[name]:
            setattr(layer, name, value)
    return _layers.cast_nest(result, plan.compute_dtype)


def _cast_view(layer: Any, plain: type, dtype: str, is_complex: bool) -> tuple[Any, dict[str, Any]]:
    """Gives a plain layer with cast copies of the parameters, and all else of the given layer."""
    view: Any = object.__new__(plain)
    given = {k: _cast(v, dtype) for k, v in vars(layer).items() if not k.startswith("_policy_")}
    if given.get("dtype") is not None:
        given["dtype"] = numpy_dtype(dtype)
    narrow = numpy_dtype(dtype).itemsize == 2 and not is_complex
    if given.get("preferred_element_type", dtype) is None and narrow:
        # 16-bit products are summed in float32 and rounded once; XLA's CPU is six times faster so.
        given["preferred_element_type"] = jax.numpy.float32
    vars(view).update(given)
    return view, given


def _cast(value: Any, dtype: str) -> Any:
    if not isinstance(value, nnx.Param):
        return value
    before = value.get_value()
    after = _layers.cast_nest(before, dtype)
    return value if after is before else value.copy(after)
