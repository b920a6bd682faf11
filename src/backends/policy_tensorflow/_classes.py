"""Wrapped classes: a mixin in front of the module's own class, so that the object stays one of it."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from policy_core import DTypePolicy
from policy_core._backend import Wrapping
from policy_core._plan import Plan, TensorSpec

from . import _kernels, _native, _plain
from ._adapters import LayerAdapter, adapter_for, call_of
from ._casting import CASTABLE
from ._ops import TF_DTYPES, Tensor
from ._quantize import dequantize

CODES, SCALE = "weight_codes", "weight_scale"


@dataclass(frozen=True)
class Stored:
    """One of a module's variables in its portable form, which is made when it is read.

    Attributes:
        variable: The variable.
        shape: The portable shape.
        codes: The dtype of the codes whose bits the variable holds, packed or not; else None.
        transposed: Whether the variable's axes are the other way round.
    """

    variable: tf.Variable
    shape: tuple[int, ...]
    codes: str | None = None
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """What the variable takes, padding included."""
        return int(self.variable.shape.num_elements()) * int(self.variable.dtype.size)

    def read(self) -> Tensor:
        """Gives the tensor."""
        value = tf.convert_to_tensor(self.variable)
        if self.codes is not None:
            n, k = self.shape
            bits = _native.unpack(value, (n, k), self.codes) if value.shape.rank == 1 else value
            return _plain.as_codes(bits, self.codes)
        if self.transposed:
            return tf.transpose(value)
        if tuple(value.shape) != self.shape:
            # A scale of the whole tensor is kept once for each channel, as the kernels read it.
            value = value[: int(np.prod(self.shape))]
        return tf.reshape(value, self.shape)


class _Reading(threading.local):
    """As what a thread's calls read the variables of modules: by the module's id."""

    def __init__(self) -> None:
        self.dtypes: dict[int, tf.DType] = {}


_READING = _Reading()


class Wrapped:
    """What all wrapped modules have: their policy, their name for it, copies and pickles.

    A module is wrapped by giving it a class of the same name with a mixin in front of its own. The
    object stays, and with it references and `isinstance`.
    """

    _policy_base: type[tf.Module]
    _policy_mixin: "type[Wrapped]"
    _policy_adapter: LayerAdapter
    _policy_wrapping: Wrapping
    _policy_plain: tuple[TensorSpec, ...]
    _policy_trained: bool = True
    _policy_call: Any = None

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The module's policy: what was asked, or its source where it has no quantized form."""
        return self._policy_wrapping.plan.policy

    @property
    def policy_plan(self) -> Plan:
        """Everything that was decided for the module."""
        return self._policy_wrapping.plan

    def __repr__(self) -> str:
        name = getattr(self, "name", "")
        return f"{type(self).__name__}(name={name!r}, dtype_policy={self.dtype_policy!r})"

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not _READING.dtypes or name.startswith("_"):
            return value
        dtype = _READING.dtypes.get(id(self))
        if dtype is None or name in super().__getattribute__("_policy_adapter").kept:
            return value
        return _read(value, dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes made at run time have no address that pickle could write down.
        state: Any
        _, _, state, *rest = super().__reduce_ex__(2)  # type: ignore[str-unpack]
        return _rebuild, (self._policy_mixin, self._policy_base), state, *rest


def _read(value: Any, dtype: tf.DType) -> Any:
    """Gives variables, also in lists, tuples and dicts, as tensors of a dtype."""
    if isinstance(value, tf.Variable):
        if value.dtype == dtype or value.dtype not in CASTABLE:
            return value
        return tf.cast(value, dtype)
    if isinstance(value, (list, tuple)) and any(isinstance(v, tf.Variable) for v in value):
        return (
            type(value)(_read(v, dtype) for v in value)
            if type(value) is tuple
            else [_read(v, dtype) for v in value]
        )
    if isinstance(value, dict) and any(isinstance(v, tf.Variable) for v in value.values()):
        return {key: _read(v, dtype) for key, v in value.items()}
    return value


@contextlib.contextmanager
def reading(module: Any, dtype: tf.DType) -> Iterator[None]:
    """Gives a scope in which this thread reads a module's float variables in a dtype."""
    before = _READING.dtypes
    _READING.dtypes = {**before, id(module): dtype}
    try:
        yield
    finally:
        _READING.dtypes = before


class KeepsCodes(Wrapped):
    """A module of whose weight only codes are left.

    Attributes:
        weight_codes: A variable, uint8: packed, or the bits of codes of shape (n, k).
        weight_scale: A variable, float32 of shape (n,).
    """

    weight_codes: tf.Variable
    weight_scale: tf.Variable

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there. Parents may read the weight: it is made anew.
        if name.startswith("_") or name != self._policy_adapter.weight:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        weight = float_weight(self, self.policy_plan.variable_dtype)
        return tf.transpose(weight) if self._policy_adapter.transposed else weight


def codes_of(module: Any) -> Stored:
    """Gives the codes of a module that keeps only codes."""
    shape = next(spec.shape for spec in module._policy_plain if spec.name == "weight")
    return Stored(module.weight_codes, shape, module._policy_wrapping.plan.weight_codes)


def float_weight(module: Any, dtype: str) -> Tensor:
    """Gives the dequantized weight, of its portable shape, of a module that keeps only codes."""
    stored = codes_of(module)
    weight, scale = tf.convert_to_tensor(stored.variable), module.weight_scale
    if weight.shape.rank == 1 and _kernels.kernel_here(stored.variable.device) == "native":
        bits = _native.unpack(weight, stored.shape, stored.codes or "")
    else:
        bits = _kernels.plain_codes(weight, stored.shape)
    values = _plain.decode(bits, stored.codes or "")
    return dequantize(values, scale[:, None], dtype)


_CLASSES: dict[tuple[type[Wrapped], type], type[Any]] = {}


def wrapped_class(mixin: type[Wrapped], base: type) -> type[Any]:
    """Gives the class of wrapped modules for a mixin and a module's own class, made once."""
    found = _CLASSES.get((mixin, base))
    if found is None or found._policy_adapter != adapter_for(base):  # registered since
        found = _CLASSES[mixin, base] = _new_class(mixin, base)
    return found


def _new_class(mixin: type[Wrapped], base: type) -> type[Any]:
    ignored: Any = getattr(base, "_TF_MODULE_IGNORED_PROPERTIES", frozenset())
    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_policy_base": base,
        "_policy_mixin": mixin,
        "_policy_adapter": adapter_for(base),
        "_TF_MODULE_IGNORED_PROPERTIES": ignored | {"_policy_wrapping", "_policy_plain"},
    }
    call = call_of(base)
    if is_function(call) and "__call__" in dir(mixin):
        attributes |= _functions(mixin, call)
    return type(base)(base.__name__, (mixin, base), attributes)


def is_function(value: Any) -> bool:
    """Says whether something is what `tf.function` gives."""
    return isinstance(value, polymorphic_function.Function)


def _functions(mixin: Any, call: Any) -> dict[str, Any]:
    """Gives `__call__` as a function such as the base class's own, and what that was made of.

    Without it SavedModels would lack the call, and its signature would refuse the compute dtype.
    """
    own = call.python_function

    @functools.wraps(own)
    def around(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.__call__(self, *args, **kwargs)

    # There is no public way to another function with the same options.
    return {"__call__": call._clone(around), "_policy_call": own}


def base_class(module: Any) -> type:
    """Gives the module's own class, without the mixin."""
    return module._policy_base if isinstance(module, Wrapped) else type(module)


def compute_dtype(module: Any) -> tf.DType:
    """Gives the dtype in which a wrapped module computes."""
    return TF_DTYPES[module._policy_wrapping.plan.compute_dtype]


def _rebuild(mixin: type[Wrapped], base: type) -> Any:
    kind: Any = wrapped_class(mixin, base)
    return kind.__new__(kind)
