"""Float8 state in, state out, for models that are values: what a training call leaves, and where."""

from typing import Any

from ._ops import Array


class Cell:
    """Holds one layer's state tensors while a function runs; a layer that is called twice finds
    in its second call what its first one left.
    """

    def __init__(self, state: dict[str, Array]) -> None:
        self.state = state


def state_of(tensors: dict[str, Any]) -> dict[str, Any]:
    """Gives the delayed-scaling tensors among a layer's tensors."""
    from ._layers import is_state

    return {name: value for name, value in tensors.items() if is_state(name, tensors)}
