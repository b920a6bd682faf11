"""Backends: what an adapter must offer, how adapters are found, and which one serves what."""

import functools
import os
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ._dtypes import did_you_mean, shorten
from .errors import BackendError

if TYPE_CHECKING:
    import numpy as np

    from ._plan import LayerSpec, Plan

GROUP = "policy_core.backends"


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """What an earlier `wrap` left at a layer.

    Attributes:
        plan: What was decided for it.
        bytes_before: What its float tensors took; 0 for those counted at another layer.
    """

    plan: "Plan"
    bytes_before: int


@dataclass(kw_only=True)
class Site:
    """One layer of a model, wherever it occurs in it.

    Attributes:
        paths: All its paths; a layer that is used in several places has several.
        aliases: Other names by which a rule may mean it, letter for letter; never as a pattern.
        layer: The framework's object.
        spec: What the plan needs to know, as if the layer were not wrapped.
        tensors: Its stored tensors by name, now: the framework's own arrays, not copies.
        wrapping: What an earlier `wrap` left; None for a plain layer.
    """

    paths: tuple[str, ...]
    layer: Any
    spec: "LayerSpec"
    tensors: dict[str, Any] = field(default_factory=dict)
    wrapping: Wrapping | None = None
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.paths[0]


@dataclass(kw_only=True)
class Step:
    """One change to one layer, decided and checked.

    Attributes:
        site: The layer.
        wrapping: What it shall have; None leaves it plain.
        floats: Float tensors, those of `site.spec.tensors`, that take the place of the layer's
            own first; None to use its own.
        stored: Tensors in their final form, those of `wrapping.plan.storage`; None to make them.
    """

    site: Site
    wrapping: Wrapping | None
    floats: "dict[str, np.ndarray] | None" = None
    stored: "dict[str, np.ndarray] | None" = None


@runtime_checkable
class Backend(Protocol):
    """What an adapter offers. `policy_core.testing` has the suite that it must pass.

    Attributes:
        name: The name of its entry point, its extra, and its value in `POLICY_BACKEND`.
    """

    # Optional: `register_layer`; `read_policy`, see `read_foreign_policy`; `rules_of(policy, sites)`,
    # which gives a map of the framework's own as rules for the paths of sites, else the policy.
    name: str

    def is_tensor_type(self, kind: type) -> bool:
        """Says whether objects of a type are tensors of this framework."""

    def convert_input(self, x: Any, dtype: str | None) -> Any:
        """Gives a tensor, or a numpy array as a tensor, cast to `dtype`.

        Only floats of at least 16 bits are cast; None casts nothing. What needs no change is given
        back itself.
        """

    def to_numpy(self, x: Any) -> "np.ndarray":
        """Gives a tensor as a numpy array, bit for bit (with ml_dtypes' dtypes)."""

    def from_numpy(self, x: "np.ndarray") -> Any:
        """Gives a numpy array as a tensor, bit for bit."""

    def storage_key(self, x: Any) -> object:
        """Gives what two tensors have in common exactly if they are the same storage."""

    def quantize(self, x: Any, dtype: str, axes: tuple[int, ...]) -> tuple[Any, Any]:
        """Gives codes and float32 scales, as `policy_core._scaling.quantize`."""

    def dequantize(self, codes: Any, scale: Any, dtype: str = "float32") -> Any:
        """Gives `codes * scale` in `dtype`."""

    def walk(self, model: Any) -> list[Site]:
        """Gives every leaf layer of a model once, in order; changes nothing."""

    def validate(self, step: Step) -> None:
        """Raises ValueError for what would make `apply` fail; changes nothing."""

    def apply(self, model: Any, steps: Sequence[Step]) -> Any:
        """Wraps, or wraps anew, one layer after the other, freeing each float weight at once.

        Returns the model: the same object where the framework's models are mutable.
        """

    def unwrap(self, model: Any, sites: Sequence[Site]) -> Any:
        """Makes layers plain again, dequantized where the float weight is gone."""


# Where a framework's classes come from, when it is not the backend's own name.
_ROOTS = {
    "numpy": "numpy",
    "ml_dtypes": "numpy",
    "jaxlib": "jax",
    "flax": "jax",
    "equinox": "jax",
    "policy_keras": "keras",
    "policy_numpy": "numpy",
    "policy_torch": "torch",
    "policy_jax": "jax",
    "policy_tensorflow": "tensorflow",
}
# Their tensors must not pass as if they were plain objects when their backend is missing.
_FRAMEWORKS = frozenset({"torch", "jax", "jaxlib", "tensorflow"})


@functools.cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points  # 20 ms that a plain import does not need

    return {point.name: point for point in entry_points(group=GROUP)}


@functools.cache
def _load(name: str) -> Backend:
    point = _entry_points()[name]
    try:
        loaded = point.load()
    except ImportError as error:
        raise BackendError(
            f"Backend {name!r} cannot be loaded: {error}. Install its framework with "
            f"`pip install 'policy-core[{name}]'`."
        ) from error
    if not isinstance(loaded, Backend):
        raise BackendError(
            f"The entry point {name!r} of {GROUP!r} gives {shorten(loaded)}, which is no Backend."
        )
    return loaded


def available_backends() -> list[str]:
    """Gives the names of the backends whose framework is installed, without importing any.

    >>> "numpy" in available_backends()
    True
    """
    from importlib.util import find_spec

    return sorted(name for name in _entry_points() if find_spec(name) is not None)


def backend(name: str | None = None) -> Backend:
    """Gives a backend.

    Args:
        name: Its name; None takes the environment variable `POLICY_BACKEND`, else `"numpy"`.

    Raises:
        TypeError: `name` is not a string.
        BackendError: There is no such backend, or its framework is not installed.

    >>> backend("numpy").name
    'numpy'
    """
    if not isinstance(name, str | None):
        raise TypeError(f"A backend's name must be a string. Received: {shorten(name)}")
    return _find(name, "name") if name else _find(os.environ.get("POLICY_BACKEND"))


@functools.lru_cache
def _find(chosen: str | bytes | None, said: str = "POLICY_BACKEND") -> Backend:
    chosen = os.fsdecode(chosen or "numpy")
    try:
        return _load(chosen)
    except KeyError:
        registered = sorted(_entry_points())
        raise BackendError(
            f"{said}={chosen!r} is not a registered backend. Registered: {', '.join(registered)}; "
            f"installed: {', '.join(available_backends())}. `pip install 'policy-core[NAME]'` "
            "installs the framework of a registered one"
            f"{did_you_mean(chosen, registered)}"
        ) from None


@functools.lru_cache(maxsize=4096)
def _framework(kind: type) -> str | None:
    """Gives the backend's name for a type, from where it and its bases are defined."""
    points = _entry_points()
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        name = _ROOTS.get(root, root)
        if name in points:
            return name
    return None


@functools.lru_cache(maxsize=4096)
def _own_tensor_backend(kind: type) -> Backend | None:
    name = _framework(kind)
    if name is None:
        root = kind.__module__.partition(".")[0]
        if root in _FRAMEWORKS and hasattr(kind, "__array__") and hasattr(kind, "dtype"):
            raise BackendError(
                f"A {kind.__module__}.{kind.__qualname__} is a tensor, but no backend for it is "
                f"registered. Registered: {', '.join(sorted(_entry_points()))}."
            )
        return None
    owner = _load(name)
    return owner if owner.is_tensor_type(kind) else None


# The variable is read for every array, so that a change is never overlooked. os.environ.get of a
# name that is not set raises and catches inside, which takes half of all of convert_input's time;
# the dict that it looks into does not. A test sets the variable and sees that this follows.
_environment: Any = getattr(os.environ, "_data", None)
_VARIABLE: Any = os.environ.encodekey("POLICY_BACKEND")
if _environment is None:
    _environment, _VARIABLE = os.environ, "POLICY_BACKEND"


@functools.lru_cache(maxsize=4096)
def _takes_any_backend(kind: type) -> bool:
    owner = _own_tensor_backend(kind)
    return owner is not None and owner.name == "numpy"


def tensor_backend(kind: type) -> Backend | None:
    """Gives the backend that handles tensors of a type; None if they are no tensors.

    numpy's arrays belong to no framework: the chosen backend takes them.
    """
    if _takes_any_backend(kind):
        return _find(_environment.get(_VARIABLE))
    return _own_tensor_backend(kind)


def read_foreign_policy(identifier: object) -> Any:
    """Gives a policy object of a framework's own as one of ours; None if it is no such object.

    Backends of frameworks that have policies offer `read_policy`, which does the same.
    """
    kind: type = type(identifier)
    name = _framework(kind)
    read = None if name is None else getattr(_load(name), "read_policy", None)
    return None if read is None else read(identifier)


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def model_backend(model: Any) -> Backend:
    """Gives the backend that serves a model.

    A model may come as a tuple, of a module and its variables; the first tells the framework.
    Functions are models of the one framework whose models are functions, JAX.

    Raises:
        TypeError: No installed backend serves objects of its type.
    """
    named = model[0] if isinstance(model, tuple) and model else model
    kind: type = type(named)
    is_function = isinstance(named, _FUNCTIONS)
    name = "jax" if is_function else _framework(kind)
    if name == "jax" and name not in available_backends():
        name = None
    if name is not None and _own_tensor_backend(kind) is None:
        return _load(name)
    raise TypeError(
        f"Expected a model of an installed framework ({', '.join(available_backends())}). "
        f"Received: {shorten(model)} of type {kind}"
    )


def register_layer(cls: type, adapter: Any) -> None:
    """Lets layers of one's own class take quantized policies.

    Args:
        cls: A layer class of an installed framework, which may override how its base computes.
        adapter: How its layers compute, in the form of that framework's backend, such as
            `policy_torch.LayerAdapter`.

    Raises:
        TypeError: No installed backend serves such a class, or its backend takes no layers of
            one's own, or `adapter` has not that backend's form.
        ValueError: The class is registered already with another adapter.
    """
    given: object = cls
    name = _framework(cls) if isinstance(given, type) else None
    register = None if name is None else getattr(_load(name), "register_layer", None)
    if register is None:
        raise TypeError(
            "Expected a layer class of a framework whose backend takes layers of one's own "
            f"(installed: {', '.join(available_backends())}). Received: {shorten(cls)}"
        )
    register(cls, adapter)
