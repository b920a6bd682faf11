"""Functions under a policy: their floats are cast on the way in and on the way out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from policy_core import DTypePolicy
from policy_core._backend import Site, Step, Wrapping

from . import _sites
from ._casting import cast_tree


class PolicyFunction:
    """A function whose float arguments and results, in any pytree, are in a compute dtype.

    Attributes:
        function: The plain function.
        wrapping: What was decided for it.
    """

    def __init__(self, function: Callable[..., Any], wrapping: Wrapping) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.wrapping = wrapping

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gives what the function gives for cast arguments, cast."""
        plan = self.wrapping.plan
        if not plan.autocast:
            return self.function(*args, **kwargs)
        args, kwargs = cast_tree((args, kwargs), plan.compute_dtype)
        return cast_tree(self.function(*args, **kwargs), plan.compute_dtype)

    @property
    def dtype_policy(self) -> DTypePolicy:
        """The function's policy."""
        return self.wrapping.plan.policy

    def __repr__(self) -> str:
        return f"PolicyFunction({self.function!r}, {self.dtype_policy!r})"


def walk(function: Any) -> list[Site]:
    """Gives the function as the one layer of a model that has no tensors."""
    wrapped = isinstance(function, PolicyFunction)
    plain = function.function if wrapped else function
    name = type(plain).__name__
    spec = _sites.layer_spec("", name, "other", {}, () if wrapped else None, "")
    wrapping = function.wrapping if wrapped else None
    return [Site(paths=("",), layer=function, spec=spec, wrapping=wrapping)]


def apply(function: Any, steps: Sequence[Step]) -> Any:
    """Gives a function under the policy that was decided."""
    plain = function.function if isinstance(function, PolicyFunction) else function
    wrapping = steps[0].wrapping if steps else None
    return plain if wrapping is None else PolicyFunction(plain, wrapping)


def unwrap(function: Any, sites: Sequence[Site]) -> Any:
    """Gives the plain function."""
    return function.function if sites else function
