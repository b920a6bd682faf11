"""Objects to JSON configs and back, in Keras's form; the only file that knows that form.

    {"module": …, "class_name": …, "config": {…}, "registered_name": …}

Only our policies and registered classes are ever built; `module` is written for Keras and never
read.
"""

from typing import Any

from ._dtypes import did_you_mean, shorten, standardize_dtype
from ._policies import DTypePolicy, FloatDTypePolicy
from ._policy_map import DTypePolicyMap
from ._quantized_policies import POLICY_CLASSES, parse_policy
from ._registry import custom_object_scope, find_class, registered_keys, registered_name
from .errors import ConfigError

MAX_DEPTH = 100
MAX_NODES = 1_000_000

# "Policy" and "PolicyV1" are the names of DTypePolicy in tf.keras and in Keras 3's first files.
_CLASSES: dict[str, type] = {
    **POLICY_CLASSES,
    "DTypePolicyMap": DTypePolicyMap,
    "Policy": DTypePolicy,
    "PolicyV1": DTypePolicy,
}
_PLAIN = (str, int, float, bool, type(None))
_FIELDS = {
    "module",
    "class_name",
    "config",
    "registered_name",
    "build_config",
    "compile_config",
    "shared_object_id",
}


def get(identifier: Any) -> DTypePolicy:
    """Gives the policy that an identifier means.

    Args:
        identifier: A policy (given back as it is), its name, its config, a dtype of any
            framework, a policy of Keras's own, or None for the default policy.

    Raises:
        ValueError: It means no policy; the message says what was expected.

    >>> get("int8_from_mixed_bfloat16")
    <QuantizedDTypePolicy "int8_from_mixed_bfloat16">
    """
    if isinstance(identifier, DTypePolicy):
        return identifier
    if isinstance(identifier, str):
        return parse_policy(identifier)
    if identifier is None:
        from ._state import dtype_policy

        return dtype_policy()
    if isinstance(identifier, dict):
        policy = deserialize(identifier)
        if isinstance(policy, DTypePolicy):
            return policy
        raise ConfigError(f"Expected the config of a policy. It gave: {shorten(policy)}")
    try:
        return DTypePolicy(standardize_dtype(identifier))
    except ValueError:
        from ._backend import read_foreign_policy

        policy = read_foreign_policy(identifier)
        if policy is not None:
            assert isinstance(policy, DTypePolicy)
            return policy
        raise ValueError(
            "Cannot interpret `dtype` argument. Expected a string, a dtype, a config or an "
            f"instance of DTypePolicy. Received: dtype={shorten(identifier)}"
        ) from None


def serialize(obj: Any) -> Any:
    """Gives a config of JSON types, from which `deserialize` makes an equal object.

    Args:
        obj: A policy, an object of a registered class, or a nest of dicts with string keys,
            lists, tuples (which come back as lists), strings, numbers, booleans and None.

    Raises:
        TypeError: Something in it is none of these.
        ConfigError: It is too large or nested too deep for `deserialize`.

    >>> serialize(get("float32"))["config"]
    {'name': 'float32'}
    """
    _check_size(obj)
    config = _serialize(obj)
    _check_size(config)
    return config


def _serialize(obj: Any) -> Any:
    if type(obj) in _PLAIN:
        return obj
    if isinstance(obj, (list, tuple)):
        return [_serialize(item) for item in obj]
    if isinstance(obj, dict):
        for key in obj:
            if not isinstance(key, str):
                raise TypeError(f"A config's keys must be strings. Received: {shorten(key)}")
        return {key: _serialize(value) for key, value in obj.items()}
    if type(obj).__module__ == "numpy" and hasattr(obj, "item") and getattr(obj, "ndim", 1) == 0:
        return obj.item()
    kind = type(obj)
    if _CLASSES.get(kind.__name__) is kind:
        # Where Keras's public names of these classes lie; its configs are the same to the byte.
        module = "keras" if kind in (DTypePolicy, FloatDTypePolicy) else "keras.dtype_policies"
        registered = None
    else:
        module = kind.__module__
        registered = registered_name(kind)
        if registered is None:
            raise TypeError(
                f"Cannot serialize object {shorten(obj)} of type {kind}. Give its class "
                "get_config() and from_config(), and register it with "
                "`@policy_core.register_serializable()`."
            )
    config = obj.get_config()
    if not isinstance(config, dict):
        raise TypeError(
            f"{kind.__name__}.get_config() must give a dict. It gave: {shorten(config)}"
        )
    return {
        "module": module,
        "class_name": kind.__name__,
        "config": _serialize(config),
        "registered_name": registered,
    }


def deserialize(config: Any, custom_objects: dict[str, Any] | None = None) -> Any:
    """Makes the object that a config describes; leaves the config as it is.

    Args:
        config: What `serialize`, or Keras's own, gave: a dict, a policy's name, None, or a list
            of these.
        custom_objects: Classes by name that are known for this call, besides registered ones.

    Returns:
        The object; a policy for a name; None for None.

    Raises:
        TypeError: The config is of another type.
        ValueError: A name means no policy.
        ConfigError: The config is too large or deep, names an unknown class or field, or lacks
            one that is needed.
    """
    if config is None:
        return None
    if isinstance(config, str):
        return parse_policy(config)
    _check_size(config)
    with custom_object_scope(custom_objects or {}):
        if isinstance(config, (list, tuple)):
            return [deserialize(item) for item in config]
        return _build(config)


def _build(config: Any) -> Any:
    if not isinstance(config, dict):
        raise TypeError(f"Could not parse config: {shorten(config)} of type {type(config)}")
    if "class_name" not in config:
        raise ConfigError(
            f"Unknown `config` as a `dict`: it has no 'class_name'. Received: {shorten(config)}"
        )
    unknown = sorted(map(str, set(config) - _FIELDS))
    if unknown:
        raise ConfigError(f"Unknown field {unknown[0]!r} in a config. Known: {sorted(_FIELDS)}.")
    kind = _class_of(config["class_name"], config.get("registered_name"))
    inner = config.get("config")
    if not isinstance(inner, dict):
        raise TypeError(
            f"Could not parse config: expected its 'config' to be a dict for {kind.__name__}. "
            f"Received: {shorten(inner)}"
        )
    if kind in _CLASSES.values():
        _check_fields(kind, inner)
    # A copy, since a from_config may take its dict apart.
    return kind.from_config(dict(inner))  # type: ignore[attr-defined]  # registration asks for it


def _class_of(class_name: object, registered: object) -> type:
    kind = find_class(registered, class_name)
    # Another registered name means another class, which happens to be called like one of ours.
    if kind is None and isinstance(class_name, str) and registered in (None, class_name):
        kind = _CLASSES.get(class_name)
    if kind is None:
        known = [*_CLASSES, *registered_keys()]
        name = class_name if registered is None else registered
        raise ConfigError(
            f"Unknown class {shorten(name)} in a config. Known: {', '.join(known)}. Register "
            "another with `@policy_core.register_serializable()` or pass `custom_objects`"
            f"{did_you_mean(name, known)}"
        )
    return kind


def _check_fields(kind: type, inner: dict[str, Any]) -> None:
    known = {
        DTypePolicyMap: {"default_policy", "policy_map"},
        DTypePolicy: {"name"},
        FloatDTypePolicy: {"name"},
        POLICY_CLASSES["QuantizedFloat8DTypePolicy"]: {
            "name",
            "mode",
            "source_name",
            "amax_history_length",
        },
    }.get(kind, {"name", "mode", "source_name"})
    unknown = sorted(map(str, set(inner) - known))
    if unknown:
        raise ConfigError(
            f"Unknown field {unknown[0]!r} in the config of {kind.__name__}. "
            f"Known: {sorted(known)}."
        )
    if "mode" in known and ("mode" in inner) is ("name" in inner):
        raise ConfigError(
            f"The config of {kind.__name__} must have 'mode', or in its older form 'name'. "
            f"Received: {shorten(inner)}"
        )


def _check_size(config: Any) -> None:
    """Refuses what is too deep for recursion or too large to be a config, without recursion."""
    waiting, nodes = [(config, 1)], 1
    while waiting:
        node, depth = waiting.pop()
        if not isinstance(node, (dict, list, tuple)):
            continue
        if depth > MAX_DEPTH:
            raise ConfigError(f"A config may be nested {MAX_DEPTH} deep; this one is deeper.")
        # Counted before they are listed: a few lists that share one another stand for very many.
        nodes += len(node)
        if nodes > MAX_NODES:
            raise ConfigError(f"A config may hold {MAX_NODES} values; this one holds more.")
        waiting += [(x, depth + 1) for x in (node.values() if isinstance(node, dict) else node)]
