"""Classes that may be built from a config: registered by name, or given for a scope."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from ._dtypes import shorten

_T = TypeVar("_T", bound=type)

_objects: dict[str, type] = {}
_names: dict[type, str] = {}
_scope: ContextVar[Mapping[str, type]] = ContextVar("policy_core_custom_objects", default={})


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
    if not isinstance(package, str) or not isinstance(name, str | None):
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
    """
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
