"""Our policies and Keras's, one as the other."""

from typing import Any

import keras

from policy_core import DTypePolicy, DTypePolicyMap
from policy_core._dtypes import shorten
from policy_core._serialization import deserialize, get, serialize


def from_keras(policy: Any) -> DTypePolicy:
    """Gives a policy of Keras's as one of ours; a map becomes a map.

    Args:
        policy: Any object of `keras.dtype_policies`, or what `keras.dtype_policies.get` takes.

    Raises:
        TypeError: It is no such object.
        ValueError: It names no policy that we know.
    """
    if not isinstance(policy, (keras.DTypePolicy, keras.dtype_policies.DTypePolicyMap)):
        policy = keras.dtype_policies.get(policy)
    if isinstance(policy, NamedPolicy):
        return policy.policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        # Not by its config: Keras changes a map's policies when it serializes them.
        default = policy._default_policy_arg
        rules = {key: from_keras(policy._policy_map[key]) for key in policy}
        return DTypePolicyMap(None if default is None else from_keras(default), rules)
    if not isinstance(policy, keras.DTypePolicy):
        raise TypeError(f"Expected a policy of Keras's. Received: {shorten(policy)}")
    found = deserialize(keras.dtype_policies.serialize(policy))
    assert isinstance(found, DTypePolicy)
    return found


def to_keras(policy: Any) -> Any:
    """Gives a policy as one of Keras's; a map becomes a map.

    Args:
        policy: A policy of ours, or what `policy_core.get` takes.

    Raises:
        ValueError: Keras has no such policy.
    """
    policy = get(policy)
    if isinstance(policy, DTypePolicyMap):
        config = serialize(policy)["config"]
        default = config["default_policy"]
        rules = {key: to_keras(policy[key]) for key in policy}
        return keras.dtype_policies.DTypePolicyMap(
            None if default is None else to_keras(deserialize(default)), rules
        )
    reason: Any = "it has no such class"
    try:
        found = keras.dtype_policies.deserialize(serialize(policy))
    except (ValueError, TypeError) as error:
        found, reason = None, error
    # Keras gives the name of a class that it does not know.
    if isinstance(found, keras.DTypePolicy):
        return found
    raise ValueError(
        f"Keras has no counterpart of {policy.name!r}. Give the policy to policy_core.wrap, "
        "whose layers keep it through saving and loading; or choose a mode that Keras has, "
        f"such as 'int8' or 'float8' ({reason})."
    )


@keras.saving.register_keras_serializable("policy_core", "DTypePolicy")
class NamedPolicy(keras.DTypePolicy):  # type: ignore[misc]  # Keras has no types
    """A policy that Keras has no class for, where Keras wants a policy of its own.

    Keras takes it for its source: layers that read it compute in floats until they are wrapped.

    Args:
        name: The policy's name, such as `"int8/weight_only_from_float32"`.
    """

    def __init__(self, name: str) -> None:
        self.policy = get(name)
        super().__init__(self.policy.source_policy.name)
        self._name = self.policy.name

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    def get_config(self) -> dict[str, Any]:
        """Gives the config from which `from_config` makes it anew."""
        return {"name": self.policy.name}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedPolicy) and self.policy == other.policy

    def __hash__(self) -> int:
        return hash(self.policy)


def as_keras(policy: DTypePolicy) -> Any:
    """Gives a policy as an object that Keras's layers take: Keras's own where it has one."""
    try:
        return to_keras(policy)
    except ValueError:
        return NamedPolicy(policy.name)
