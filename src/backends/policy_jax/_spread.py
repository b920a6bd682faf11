"""How a call of the kernels is spread over a mesh of devices: by rows, and by output channels.

XLA's partitioner knows nothing about a custom call, and would gather all that it is given on each
device. So each axis of each operand and of the result gets a name. Axes of one name are spread
alike; an axis without a name, such as a contracted one, is whole on every device. A packed weight
has panels of 32 channels for its first axis, which is spread as the channels are.

Where a mesh's axes are explicit, the types of arrays say how they are spread, and the last functions
here say so of what products give.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ._ops import Array

CHANNELS = "n"
PANEL = 32
"""Channels of a panel of a packed weight."""

Names = tuple[str, ...]
"""A name for each axis; `""` for one that is whole on every device."""


def row_names(rank: int) -> Names:
    """Gives names for leading axes."""
    return tuple(f"row{i}" for i in range(rank))


def spread(
    call: Callable[..., Array], n: int, operands: Sequence[Names], result: Names, packed: int | None
) -> Callable[..., Array]:
    """Gives a function of the operands that XLA's partitioner can spread.

    Args:
        call: Takes the number of channels at hand, and operands; gives the result.
        n: How many channels there are.
        operands: Names of their axes.
        result: Names of its axes.
        packed: Which operand is a packed weight; None if none is.
    """
    if packed is not None and (n % PANEL or n == PANEL):
        # Its last panel is not full: the channels of a device would be no whole panels. And of one
        # panel alone Shardy's rules cannot say that its channels are two axes in one.
        operands, result = [_without_channels(o) for o in operands], _without_channels(result)
        packed = None
    operands = tuple(operands)

    def partition(mesh: Any, given: Any, shape: Any) -> tuple[Any, Any, Any, Any]:
        axes = _axes_of([(result, shape)])
        ways = _ways(mesh, axes.get(CHANNELS))
        if n % (ways if packed is None else ways * PANEL):
            del axes[CHANNELS]
            ways = 1
        shardings = tuple(_sharding(mesh, axes, names) for names in operands)
        local = functools.partial(call, n // ways)
        return mesh, local, _sharding(mesh, axes, result), shardings

    def infer(mesh: Any, given: Any, shape: Any) -> Any:
        axes = _axes_of([*zip(operands, given, strict=True)])
        return _sharding(mesh, axes, result)

    spreading = custom_partitioning(functools.partial(call, n))
    rule, whole = _rule(operands, result, packed)
    sizes = {} if packed is None else {"within": PANEL}
    spreading.def_partition(
        partition, infer, sharding_rule=rule, need_replication_factors=whole, **sizes
    )
    return spreading


def _without_channels(names: Names) -> Names:
    return tuple("" if name == CHANNELS else name for name in names)


def flat(*parts: Any) -> set[str]:
    """Gives the mesh axes that entries of a PartitionSpec name."""
    return {a for part in parts for a in (part if isinstance(part, tuple) else (part,))} - {None}


def _axes_of(values: Sequence[tuple[Names, Any]]) -> dict[str, Any]:
    """Gives the mesh axes over which each name is spread; a mesh axis serves one name."""
    axes: dict[str, Any] = {}
    taken: set[str] = set()
    for names, value in values:
        spec = value.sharding.spec if value.sharding is not None else ()
        for name, over in zip(names, spec, strict=False):
            own = flat(over)
            if name and own and name not in axes and not own & taken:
                axes[name] = over
                taken |= own
    return axes


def _ways(mesh: Any, over: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in flat(over))


def _sharding(mesh: Any, axes: dict[str, Any], names: Names) -> NamedSharding:
    return NamedSharding(mesh, P(*(axes.get(name) for name in names)))


def _rule(
    operands: Sequence[Names], result: Names, packed: int | None
) -> tuple[str, tuple[str, ...]]:
    """Gives Shardy's rule, an einsum over axes, and the names in it of axes that must be whole.

    Where a weight is packed, channels are two axes in one: panels, and channels within a panel.
    """
    whole: list[str] = []
    texts = []
    for i, names in enumerate((*operands, result)):
        channels = CHANNELS if packed is None or i == packed else f"({CHANNELS} within)"
        text = []
        for name in names:
            if not name:
                whole.append(f"whole{len(whole)}")
            text.append(channels if name == CHANNELS else name or whole[-1])
        texts.append(" ".join(text))
    return f"{', '.join(texts[:-1])} -> {texts[-1]}", tuple(whole)


def explicit_mesh(*arrays: Array) -> Any:
    """Gives the mesh that is a part of the arrays' types, as `jax.make_mesh` makes them; else None."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def typed_sharding(mesh: Any, array: Array) -> NamedSharding:
    """Gives the sharding in an array's type, over a mesh."""
    return NamedSharding(mesh, jax.typeof(array).sharding.spec)


def rows_sharding(mesh: Any, x: Array, weight: Array) -> NamedSharding:
    """Gives the sharding of a product's type: rows as those of `x`, channels as the weight's."""
    rows = tuple(jax.typeof(x).sharding.spec)[: x.ndim - 1]
    channels = (*jax.typeof(weight).sharding.spec, None)[0]
    return NamedSharding(mesh, P(*rows, None if flat(channels) & flat(*rows) else channels))


def taken_sharding(mesh: Any, ids: Array) -> NamedSharding:
    """Gives the sharding of the type of rows that ids have taken from a table."""
    spec = jax.typeof(ids).sharding.spec
    return NamedSharding(mesh, P(*spec, *(None,) * (ids.ndim + 1 - len(spec))))
