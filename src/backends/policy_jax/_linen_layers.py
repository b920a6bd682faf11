"""A flax linen module under a policy: it steps in where a wrapped layer of it is called."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from policy_core import DTypePolicy
from policy_core._backend import Wrapping
from policy_core._forms import IN_OUT, OUT_IN, Axes, as_they_are
from policy_core._plan import Plan, TensorSpec

from . import _forms, _kernels, _layers
from ._forms import general
from ._nnx_forms import Form, convolution
from ._ops import SHAPES, Array, numpy_dtype

QUANTIZED = "quantized"
"""The collection of codes and scales: no parameters, so that no optimizer takes them."""
FLOAT8 = "float8"
"""The collection of delayed-scaling states; a call in training is one that may change it."""


@dataclass(frozen=True)
class LinenLayer:
    """One wrapped layer of a linen module.

    Attributes:
        wrapping: What was decided for it.
        form: What it is, as far as its parameters tell.
        plain: The specs of its plain tensors.
        shape: The shape of its plain weight; `()` if it has none.
    """

    wrapping: Wrapping
    form: Form
    plain: tuple[TensorSpec, ...]
    shape: tuple[int, ...]

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The layer's policy."""
        return self.wrapping.plan.policy

    def __repr__(self) -> str:
        return f"LinenLayer({self.dtype_policy!r}, kind={self.form.kind!r}, shape={self.shape})"


class PolicyLinen:
    """A linen module whose layers follow policies: `apply` as the module's own.

    Attributes:
        module: The plain module.
        table: The wrapped layers by path.
    """

    def __init__(self, module: nn.Module, table: Mapping[str, LinenLayer]) -> None:
        self.module = module
        self.table = dict(table)

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Gives what `module.apply` gives, computed under the layers' policies.

        A call is in training, and updates float8 states, exactly if `mutable` names the collection
        `"float8"`.
        """
        ready = {**variables, "params": self._cast(variables.get("params", {}), "")}
        with nn.intercept_methods(self._intercept):
            return self.module.apply(ready, *args, **kwargs)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: variables are made by the plain module, and wrapped with it."""
        raise TypeError(
            "A wrapped module has its variables already. Use module.init of the plain module, then "
            "pc.wrap((module, variables), policy)."
        )

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: a bound module would compute without the policies."""
        raise TypeError(
            "A bound module does not follow policies. Call apply(variables, …), with method=… for "
            "another method; pc.unwrap gives the plain module back."
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "table") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PolicyLinen):
            return NotImplemented
        return bool(self.module == other.module and self.table == other.table)

    def __hash__(self) -> int:
        return hash((self.module, tuple(self.table.items())))

    def __repr__(self) -> str:
        lines = [f"  {path or '(module)'}: {layer!r}" for path, layer in self.table.items()]
        return "\n".join(["PolicyLinen(", f"  {self.module!r}".replace("\n", "\n  "), *lines, ")"])

    def _cast(self, node: Any, path: str) -> Any:
        """Gives parameters in the dtype that their layer computes in."""
        layer = self.table.get(path)
        dtype = None
        if layer is not None and layer.wrapping.plan.autocast:
            plan = layer.wrapping.plan
            dtype = None if plan.quantized else _layers.inside_dtype(plan, layer.form.kind)
        return {
            key: self._cast(value, f"{path}/{key}" if path else str(key))
            if hasattr(value, "items")
            else (value if dtype is None else _layers.cast_nest(value, dtype))
            for key, value in node.items()
        }

    def _intercept(self, next_function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = self.table.get("/".join(context.module.path))
        name = context.method_name
        if layer is None or not layer.wrapping.plan.autocast:
            return next_function(*args, **kwargs)
        plan = layer.wrapping.plan
        if name == "setup":
            # An Embed asks for its table there, and a quantized one has none.
            return None if plan.quantized else next_function(*args, **kwargs)
        if plan.quantized and name not in ("__call__", "attend"):
            # A step on the way to one of these, as lifted transforms take it.
            return next_function(*args, **kwargs)
        args, kwargs = _layers.cast_nest((args, kwargs), plan.compute_dtype)
        if not plan.quantized:
            inside = _layers.inside_dtype(plan, layer.form.kind)
            args, kwargs = _layers.cast_nest((args, kwargs), inside)
            with _computing_in(context.module, inside):
                result = next_function(*args, **kwargs)
            return _layers.cast_nest(result, plan.compute_dtype)
        what = actual_form(context.module)
        if what.axes != layer.form.axes or what.kind != layer.form.kind:
            reason = f": {what.left_out}" if what.left_out else ""
            raise TypeError(
                f"At {'/'.join(context.module.path)!r} a {type(context.module).__name__} computes "
                f"that cannot use codes of its weight{reason}. Layers under nn.scan and nn.vmap are "
                "such, with their stacked kernels. Give this path a float policy."
            )
        if what.kind == "embedding":
            return _embedding(context.module, name, plan, *args, **kwargs)
        return _linear(context.module, what, plan, *args, **kwargs)


@contextlib.contextmanager
def _computing_in(module: nn.Module, dtype: str) -> Iterator[None]:
    """Lets a bound module compute in a dtype, whatever it was made for."""
    # linen modules are frozen against their users, not against what runs them.
    before = {}
    if getattr(module, "dtype", None) is not None:
        before["dtype"] = module.dtype
        object.__setattr__(module, "dtype", numpy_dtype(dtype))
    if numpy_dtype(dtype).itemsize == 2 and getattr(module, "dot_general", dtype) is None:
        # 16-bit products are summed in float32 and rounded once; XLA's CPU is six times faster so.
        before["dot_general"] = None
        object.__setattr__(module, "dot_general", _wide_dot_general)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _wide_dot_general(*args: Any, **kwargs: Any) -> Array:
    if not any(jnp.iscomplexobj(operand) for operand in args[:2]):
        kwargs = {**kwargs, "preferred_element_type": jnp.float32}
    return jax.lax.dot_general(*args, **kwargs)


def actual_form(module: nn.Module) -> Form:
    """Gives what a module is that a call has reached."""
    plain = type(module)
    for base in (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Embed, nn.Conv):
        if isinstance(module, base) and plain.__call__ is not base.__call__:
            return Form(left_out=f"{plain.__name__} overrides __call__")
    for name in ("dot_general", "dot_general_cls"):
        if getattr(module, name, None) is not None:
            return Form(left_out=f"it computes with a {name} of its own")
    if isinstance(module, nn.Dense):
        return Form("linear", "kernel", IN_OUT, as_they_are)
    if isinstance(module, nn.Embed):
        return Form("embedding", "embedding", OUT_IN)
    if isinstance(module, nn.DenseGeneral):
        return _dense_general(module)
    if isinstance(module, nn.Einsum):
        return _einsum(module)
    if isinstance(module, nn.Conv):
        size = module.kernel_size
        return convolution(module, (size,) if isinstance(size, int) else tuple(size))
    return Form(left_out="it is no layer with a product on codes")


def _dense_general(module: nn.DenseGeneral) -> Form:
    if module.batch_dims:
        return Form(left_out="its weight has batch axes")
    axis, features = _tuple(module.axis), _tuple(module.features)
    axes = Axes(tuple(range(len(axis), len(axis) + len(features))), tuple(range(len(axis))))
    return Form("linear", "kernel", axes, general(axis, features))


def _einsum(module: nn.Einsum) -> Form:
    try:
        equation = _forms.equation(module.einsum_str or "")
    except ValueError as error:
        return Form(left_out=str(error))
    out_shape = tuple(module.shape[axis] for axis in equation.axes.out)
    return Form("linear", "kernel", equation.axes, equation.arrange(SHAPES, out_shape))


def _tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _linear(module: nn.Module, what: Form, plan: Plan, inputs: Array, *rest: Any) -> Array:
    if any(value is not None for value in rest):
        raise TypeError(f"A quantized {type(module).__name__} takes its input alone.")
    training = plan.trainable and plan.delayed and module.is_mutable_collection(FLOAT8)
    tensors: dict[str, Array] = {}
    for spec in plan.storage:
        if spec.name == "bias":
            tensors["bias"] = module.get_variable("params", "bias").reshape(-1)
        elif spec.name == "weight" and plan.trainable:
            assert what.axes is not None
            kernel: Array = module.get_variable("params", what.weight)
            tensors["weight"] = what.axes.to_file(SHAPES, kernel)
        else:
            of_codes = spec.name in ("weight", "weight_scale") and not plan.trainable
            tensors[spec.name] = module.get_variable(QUANTIZED if of_codes else FLOAT8, spec.name)
    rows, finish = what.arrange(inputs)  # type: ignore[misc]  # a linear layer has an arrangement
    y, state = _layers.linear(_layers.recipe(plan, training), rows, tensors)
    if training and rows.size:
        for name, value in state.items():
            module.put_variable(FLOAT8, name, value)
    return finish(y)


def _embedding(module: nn.Embed, method: str, plan: Plan, *args: Array, **kwargs: Array) -> Array:
    (x,) = (*args, *kwargs.values())
    codes: Array = module.get_variable(QUANTIZED, "weight")
    scale: Array = module.get_variable(QUANTIZED, "weight_scale")
    if method == "attend":
        y = _kernels.linear_weight_only(x, codes, scale.reshape(-1), None)
        return y.astype(numpy_dtype(plan.compute_dtype))
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"Expected integer ids. Received dtype {x.dtype}.")
    return _layers.embedding(codes, scale, x, plan.compute_dtype)
