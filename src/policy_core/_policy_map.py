"""`DTypePolicyMap`: from layer paths to policies."""

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping
from typing import Any, Self

from . import _state
from ._dtypes import shorten
from ._modes import Mode
from ._patterns import compile_pattern
from ._policies import DTypePolicy

_MISSING = object()


class DTypePolicyMap(DTypePolicy, MutableMapping[str, DTypePolicy]):
    """A mutable mapping from paths and patterns to policies, which is itself a policy.

    A path is looked up as an exact key first, then as what exactly one key matches as a regular
    expression (`re.fullmatch`), else it has the default policy. `in`, `len` and iteration speak
    of the keys alone. Its own dtypes are those of the default policy.

    Args:
        default_policy: A policy or anything `pc.get` takes, but no map. None follows the default
            policy of the process, also after a round trip through JSON, and then the policies in
            the map take their sources from it too, as in Keras.
        policy_map: A dict from keys to policies (or anything `pc.get` takes); it is copied.

    Raises:
        TypeError: `policy_map` is not a dict, or a key is not a string.
        ValueError: A policy cannot be understood, or a key is no valid pattern.

    >>> policies = DTypePolicyMap("float32", {"encoder/.*": "int8_from_float32"})
    >>> policies["encoder/0/dense"].name, policies["encoder"].name
    ('int8_from_float32', 'float32')
    """

    _default: DTypePolicy | None
    _rules: dict[str, DTypePolicy]

    def __init__(
        self, default_policy: Any = None, policy_map: Mapping[str, Any] | None = None
    ) -> None:
        from ._serialization import get

        if isinstance(default_policy, DTypePolicyMap):
            raise ValueError("`default_policy` cannot be a `DTypePolicyMap`.")
        rules: Any = policy_map  # not all callers are checked
        if isinstance(rules, DTypePolicy) or not isinstance(rules, Mapping | None):
            raise TypeError(
                "If specified, `policy_map` must be a dict. "
                f"Received: policy_map={shorten(policy_map)} of type {type(policy_map)}"
            )
        default = None if default_policy is None else get(default_policy)
        object.__setattr__(self, "_default", default)
        object.__setattr__(self, "_rules", {})
        for key, policy in (policy_map or {}).items():
            self[key] = policy

    @property
    def default_policy(self) -> DTypePolicy:
        """The policy of paths that no rule matches; that of the process if none was given."""
        return _state.dtype_policy() if self._default is None else self._default

    @property
    def name(self) -> str:
        """`"map_"` and the name of the default policy."""
        return f"map_{self.default_policy.name}"

    @property
    def compute_dtype(self) -> str:
        """The compute dtype of the default policy."""
        return self.default_policy.compute_dtype

    @property
    def variable_dtype(self) -> str:
        """The variable dtype of the default policy."""
        return self.default_policy.variable_dtype

    @property
    def quantization_mode(self) -> str | None:
        """The quantization mode of the default policy."""
        return self.default_policy.quantization_mode

    @property
    def quantization(self) -> Mode | None:
        """The mode, with its parameters, of the default policy."""
        return self.default_policy.quantization

    @property
    def source_policy(self) -> DTypePolicy:
        """The source of the default policy."""
        return self.default_policy.source_policy

    def matching_keys(self, path: str) -> list[str]:
        """Gives the keys that apply to a path: itself if it is a key, else all that match it."""
        if path in self._rules:
            return [path]
        return [key for key in self._rules if compile_pattern(key)(path)]

    def __getitem__(self, path: str) -> DTypePolicy:
        """Gives the policy of a path.

        Raises:
            TypeError: The path is not a string.
            ValueError: It is no key, and more than one key matches it.
        """
        _check_key(path, "path")
        keys = self.matching_keys(path)
        if len(keys) > 1:
            raise ValueError(
                f"Path '{path}' matches multiple dtype policy specification keys: {keys}. "
                "Make sure that a path matches at most one key; a key that is exactly the path "
                "comes before all patterns."
            )
        return self._rules[keys[0]] if keys else self.default_policy

    def __setitem__(self, key: str, policy: Any) -> None:
        """Adds a rule.

        Raises:
            TypeError: The key is not a string.
            ValueError: The key is there already, is no valid pattern, or the policy cannot be
                understood or is a map.
        """
        from ._serialization import get

        _check_key(key, "key")
        if key in self._rules:
            raise ValueError(
                f"{key} already exist in the DTypePolicyMap with value {self._rules[key]}. "
                "Delete it first, or use another key."
            )
        compile_pattern(key)
        try:
            value = get(policy)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Cannot interpret the assigned value by `policy_core.get`. "
                f"Received: {shorten(policy)} of type {type(policy)} for key {key!r}: {error}"
            ) from error
        if isinstance(value, DTypePolicyMap):
            raise ValueError(
                f"Cannot interpret the assigned value: a map cannot hold a map. Key: {key!r}"
            )
        self._rules[key] = value

    def __delitem__(self, key: str) -> None:
        del self._rules[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __contains__(self, key: object) -> bool:
        return key in self._rules

    # The mixin's items, pop and setdefault ask __getitem__ whether a key is there, and that
    # always answers with a policy.
    def items(self) -> ItemsView[str, DTypePolicy]:
        """Gives a view of the keys and their policies."""
        return self._rules.items()

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Removes a key and gives its policy, or `default`; KeyError without one."""
        return self._rules.pop(key) if default is _MISSING else self._rules.pop(key, default)

    def setdefault(self, key: str, default: Any = None) -> DTypePolicy:
        """Gives the policy of a key, after adding `default` if the key is not there."""
        if key not in self._rules:
            self[key] = default
        return self._rules[key]

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Adds several rules; none, if one of them cannot be added."""
        added = self.__copy__()
        for rules in (other, more):
            for key, policy in dict(rules).items():
                added[key] = policy
        self._rules.update(added._rules)

    def get_config(self) -> dict[str, Any]:
        """Gives the arguments of the constructor, as JSON types.

        With no default policy the sources of all policies are written as null, so that they
        follow the default policy of the process that reads them.
        """
        from ._serialization import serialize

        rules = {key: serialize(policy) for key, policy in self._rules.items()}
        if self._default is None:
            for config in rules.values():
                for field in ("name", "source_name"):
                    if field in config["config"]:
                        config["config"][field] = None
        default = None if self._default is None else serialize(self._default)
        return {"default_policy": default, "policy_map": rules}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Self:
        """Makes the map that `get_config` described; leaves the config as it is."""
        from ._registry import custom_object_scope

        with custom_object_scope(custom_objects or {}):
            return cls(**config)

    def _key(self) -> tuple[Any, ...]:
        return (type(self), self._default, self._rules)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __copy__(self) -> Self:
        return type(self)(self._default, self._rules)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._default, self._rules))

    def __repr__(self) -> str:
        mapping = [(key, policy.name) for key, policy in self._rules.items()]
        return (
            f"<{type(self).__name__} default_policy={self.default_policy.name}, mapping={mapping}>"
        )


def _check_key(key: object, what: str) -> None:
    if not isinstance(key, str):
        raise TypeError(f"A {what} must be a string. Received: {shorten(key)} of type {type(key)}")
