"""Finds which kind of JAX model it is, without importing what it is not made of."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from policy_core._backend import Site, Step
from policy_core._dtypes import shorten

from . import _functions, _trees
from ._functions import PolicyFunction
from ._sites import Stored
from ._trees import Parameters


def walk(model: Any) -> list[Site]:
    """Gives every layer of a model once, with all its paths."""
    return _front(model).walk(model)


def apply(model: Any, steps: Sequence[Step]) -> Any:
    """Gives the model with its layers changed: the same object for flax nnx, else a new one."""
    return _front(model).apply(model, steps)


def unwrap(model: Any, sites: Sequence[Site]) -> Any:
    """Gives the model with its layers plain again."""
    return _front(model).unwrap(model, sites)


def storage_key(x: Any) -> object:
    """Gives what two tensors have in common exactly if they are the same storage."""
    return id(x.source) if isinstance(x, Stored) else id(x)


def _front(model: Any) -> ModuleType:
    """Gives the module of this package that serves a kind of model."""
    if isinstance(model, Parameters):
        return _trees
    if isinstance(model, PolicyFunction):
        return _functions
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(model, nnx.Module):
        from . import _nnx

        return _nnx
    if equinox is not None and isinstance(model, equinox.Module):
        from . import _equinox

        return _equinox
    linen = sys.modules.get("flax.linen")
    if isinstance(model, tuple) and len(model) == 2 and linen is not None:
        from ._linen_layers import PolicyLinen

        if isinstance(model[0], (linen.Module, PolicyLinen)):
            from . import _linen

            return _linen
    if linen is not None and isinstance(model, linen.Module):
        raise TypeError(
            "A flax linen module alone has no parameters to wrap. Use pc.wrap((module, variables), "
            f"policy), with the variables from module.init. Received: {shorten(model)}"
        )
    if callable(model):
        return _functions
    raise TypeError(
        "Expected a flax nnx module, a pair (flax linen module, variables), an equinox module or a "
        f"function. Received: {shorten(model)} of type {type(model)}"
    )
