"""`convert_input`: walks a nest and casts its float tensors, each on its own framework."""

import copy
import dataclasses
from typing import Any

from . import _backend, _state
from ._dtypes import DTYPES


def convert_input(x: Any, policy: Any = None, autocast: bool = True) -> Any:
    """Gives `x` with its float tensors in the policy's compute dtype; everything else untouched.

    Args:
        x: A tensor of any framework, or a nest of dicts, lists, tuples, named tuples and
            dataclasses. Each leaf is judged alone: integers, booleans, complex numbers, strings,
            keys, None, Python scalars and float8 codes pass as they are; numpy arrays become
            tensors of the chosen backend. What needs no change is given back, not copied.
        policy: A policy or anything `pc.get` takes; None for the default policy.
        autocast: False casts nothing.

    Raises:
        ValueError: There is no such policy.
        BackendError: The backend that should hold numpy arrays is not there.

    >>> import numpy as np
    >>> out = convert_input({"x": np.ones(2), "ids": np.arange(2)}, "mixed_bfloat16")
    >>> out["x"].dtype, out["ids"].dtype
    (dtype(bfloat16), dtype('int64'))
    """
    if policy is None:
        policy = _state.dtype_policy()
    try:
        dtype = policy.compute_dtype
    except AttributeError:
        from ._serialization import get

        dtype = get(policy).compute_dtype
    return convert(x, dtype, autocast)


def convert(x: Any, dtype: str, autocast: bool) -> Any:
    """Casts the float tensors of a nest to `dtype` (a canonical name), if `autocast`."""
    kind = type(x)
    owner = _backend.tensor_backend(kind)
    if owner is not None:
        return owner.convert_input(x, dtype if autocast and dtype in _TARGETS else None)
    if kind in _PLAIN:
        return x
    if isinstance(x, dict):
        return _rebuilt(x, {key: convert(value, dtype, autocast) for key, value in x.items()})
    if isinstance(x, (list, tuple)):
        return _resequenced(x, [convert(value, dtype, autocast) for value in x])
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(x) if hasattr(x, field.name)]
        return _refielded(x, {n: convert(getattr(x, n), dtype, autocast) for n in names})
    return x


_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})


# What autocast may cast to: nothing happens under an integer policy.
_TARGETS = frozenset(name for name, dtype in DTYPES.items() if dtype.kind == "float")


def _rebuilt(x: dict[Any, Any], items: dict[Any, Any]) -> Any:
    if all(items[key] is x[key] for key in x):
        return x
    # A copy keeps the class of an OrderedDict or a model's output and what else it holds.
    result = copy.copy(x)
    result.update(items)
    return result


def _resequenced(x: Any, values: list[Any]) -> Any:
    if all(new is old for new, old in zip(values, x, strict=True)):
        return x
    if hasattr(x, "_make"):  # a named tuple's constructor takes its fields one by one
        return x._make(values)
    return type(x)(values)


def _refielded(x: Any, values: dict[str, Any]) -> Any:
    changed = {name: value for name, value in values.items() if value is not getattr(x, name)}
    if not changed:
        return x
    # Not dataclasses.replace: it would run __post_init__ and refuse init=False fields.
    result = copy.copy(x)
    for name, value in changed.items():
        object.__setattr__(result, name, value)
    return result
