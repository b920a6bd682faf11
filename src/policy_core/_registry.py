"""Classes that may be built from a config: registered by name, or given for a scope."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TypeVar

from ._dtypes import shorten

_T = TypeVar("_T", bound=type)

_objects: dict[str, type] = {}
_names: dict[type, str] = {}
_scope: ContextVar[Mapping[str, type]] = ContextVar(
    "policy_core_custom_objects", default=MappingProxyType({})
)


def register_serializable(package: str = "Custom", name: str | None = None) -> Callable[[_T], _T]:
    """Gives a class decorator that lets `pc.serialize` and `pc.deserialize` handle the class.

    Args:
        package: What the name is registered under: the key is `"package>name"`.
        name: None for the class's own name.

    Returns:
        A decorator that gives the class back. It raises TypeError for what is no class, and
        ValueError for a class without `get_config` and `from_config`, and for a key that another
        class has; the same class defined anew (in a notebook) takes the place of the old one.

    >>> @register_serializable("my_package")
    ... class Block:
    ...     def get_config(self): return {}
    ...     @classmethod
    ...     def from_config(cls, config): return cls()
    >>> registered_name(Block)
    'my_package>Block'
    """
    typed = isinstance(package, str) and isinstance(name, str | None)  # type: ignore[redundant-expr]  # not all callers are checked
    if not typed:
        raise TypeError(
            "Use `@register_serializable()` with parentheses; `package` and `name` must be "
            f"strings. Received: package={shorten(package)}, name={shorten(name)}"
        )

    def register(kind: _T) -> _T:
        if not isinstance(kind, type):
            raise TypeError(f"Only classes can be registered. Received: {shorten(kind)}")
        for method in ("get_config", "from_config"):
            if not callable(getattr(kind, method, None)):
                raise ValueError(
                    f"Cannot register {kind.__name__}, a class that does not have a "
                    f"{method}() method."
                )
        key = f"{package}>{kind.__name__ if name is None else name}"
        other = _objects.get(key, kind)
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ValueError(
                f"{key!r} is registered already, for {other.__module__}.{other.__qualname__}. "
                "Use another package or name."
            )
        _names.pop(other, None)
        _objects[key] = kind
        _names[kind] = key
        return kind

    return register


@contextlib.contextmanager
def custom_object_scope(objects: Mapping[str, type]) -> Iterator[None]:
    """Makes classes known to `pc.deserialize` by name inside a `with` block.

    Args:
        objects: From the class name or registered name in a config to the class. Scopes nest:
            inner names come first.

    Raises:
        TypeError: It is no mapping from strings to classes with `from_config`.
    """
    if not isinstance(objects, Mapping):
        raise TypeError(
            f"Custom objects must be a dict from names to classes. Received: {shorten(objects)}"
        )
    for name, kind in objects.items():
        named = isinstance(name, str) and isinstance(kind, type)  # type: ignore[redundant-expr]  # not all callers are checked
        if not named or not hasattr(kind, "from_config"):
            raise TypeError(
                "Custom objects must map strings to classes that have a from_config() method. "
                f"Received: {shorten(name)}: {shorten(kind)}"
            )
    token = _scope.set({**_scope.get(), **objects})
    try:
        yield
    finally:
        _scope.reset(token)


def registered_name(kind: type) -> str | None:
    """Gives the key under which a class is registered, or None."""
    return _names.get(kind)


def find_class(registered: object, class_name: object) -> type | None:
    """Gives the class of a config: from the scope, else from the registry, else None."""
    scope = _scope.get()
    for name in (registered, class_name):
        if isinstance(name, str):
            found = scope.get(name) or _objects.get(name)
            if found is not None:
                return found
    return None


def registered_keys() -> list[str]:
    """Gives all names that `find_class` knows now."""
    return sorted({*_objects, *_scope.get()})
