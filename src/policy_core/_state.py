"""The default policy: one for the process, and a scope for the current context on top of it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ._dtypes import shorten

if TYPE_CHECKING:
    from ._policies import DTypePolicy

_process_default: "DTypePolicy | None" = None
_scoped: "ContextVar[DTypePolicy | None]" = ContextVar("policy_core_scope", default=None)


def dtype_policy() -> "DTypePolicy":
    """Gives the default policy: that of the innermost `policy_scope`, else of the process."""
    global _process_default
    policy = _scoped.get() or _process_default
    if policy is None:
        from ._policies import DTypePolicy

        policy = _process_default = DTypePolicy("float32")
    return policy


def set_dtype_policy(policy: Any) -> None:
    """Sets the default policy of the process, for all its threads.

    Args:
        policy: The name of a policy, a config, or a policy. Not a map: give that to `wrap`.

    Raises:
        ValueError: It is none of these.
    """
    global _process_default
    _process_default = _as_default(policy)


@contextlib.contextmanager
def policy_scope(policy: Any) -> "Iterator[DTypePolicy]":
    """Makes a policy the default inside a `with` block, for this thread or async task alone.

    Args:
        policy: As for `set_dtype_policy`.

    >>> with policy_scope("mixed_bfloat16") as policy:
    ...     dtype_policy() is policy
    True
    """
    scoped = _as_default(policy)
    token = _scoped.set(scoped)
    try:
        yield scoped
    finally:
        _scoped.reset(token)


def _as_default(policy: Any) -> "DTypePolicy":
    from ._policies import DTypePolicy
    from ._policy_map import DTypePolicyMap
    from ._serialization import get

    if isinstance(policy, (str, dict)):
        policy = get(policy)
    if isinstance(policy, DTypePolicyMap) or not isinstance(policy, DTypePolicy):
        raise ValueError(
            "Invalid `policy` argument. Expected the string name of a policy (such as "
            f"'mixed_float16') or a `DTypePolicy` that is not a map. Received: policy="
            f"{shorten(policy)} (of type {type(policy)})"
        )
    return policy
