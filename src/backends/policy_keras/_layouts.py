"""Over which devices the codes of a layer are spread on JAX: as its kernel was.

`keras.distribution` names the layout of a variable by its path, and no path of codes is in anyone's
layout map. So they follow the kernel: output channels and what is summed are each spread over the
mesh axes that its axes had. State is whole on each device.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from policy_core._forms import OUT_IN, Axes
from policy_jax._ops import Array
from policy_jax._packed import is_packed
from policy_jax._sites import single_device
from policy_jax._spread import PANEL, flat


def layout_of(array: Array) -> NamedSharding | None:
    """Gives how an array is spread over a mesh; None for one without a mesh."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array.sharding, NamedSharding):
        return None
    return array.sharding


def layout(
    kernel: NamedSharding | None, shape: tuple[int, ...] | None = None, axes: Axes | None = None
) -> NamedSharding | None:
    """Gives the layout of a variable beside a kernel, or in its place.

    Args:
        kernel: The layout of the kernel; None without a mesh.
        shape: The variable's; None for the kernel itself.
        axes: The kernel's axes that make up the two of `shape`, (out, in) or (out, …); None for a
            variable that is whole on each device.
    """
    if kernel is None or shape is None:
        return kernel
    over = [None] * len(shape) if axes is None else _over(kernel, axes)
    spec = (
        part if size % ways(kernel, part) == 0 else None
        for size, part in zip(shape, over, strict=True)
    )
    return NamedSharding(kernel.mesh, P(*spec))  # type: ignore[no-untyped-call]


def _over(kernel: NamedSharding, axes: Axes) -> list[Any]:
    """Gives the mesh axes over which the two of (out, in) are spread."""
    return [_of_group(kernel, axes.out), _of_group(kernel, axes.contracted)]


def _of_group(kernel: NamedSharding, group: tuple[int, ...]) -> Any:
    # Of axes in one only the first can be spread: parts of others are not next to each other.
    first, *others = (_part(kernel, axis) for axis in group)
    return None if any(flat(part) for part in others) else first


def _part(kernel: NamedSharding, axis: int) -> Any:
    return kernel.spec[axis] if axis < len(kernel.spec) else None


def ways(layout: NamedSharding, part: Any) -> int:
    """Gives over how many devices an axis is spread whose part of a PartitionSpec is given."""
    return math.prod(layout.mesh.shape[axis] for axis in flat(part))


def reason_against(array: Array | None, axes: Axes | None) -> str:
    """Says why native kernels cannot multiply by a weight as it lies on its devices; `""` if they can.

    They can where it is whole, or spread by panels of output channels, but not where each device has
    a part of each sum.

    Args:
        array: The weight; None for none.
        axes: Which of its axes make up (out, in); None for one of that shape, or packed.
    """
    if single_device(array):
        return ""
    assert array is not None
    if not array.is_fully_addressable:
        return "the layer is on devices of several processes"
    if is_packed(array) or array.is_fully_replicated:
        return ""
    spread, axes = layout_of(array), axes or OUT_IN
    if spread is None or array.ndim != len(axes.out) + len(axes.contracted):
        return "the layer is on several devices"
    out, *others = (_part(spread, axis) for axis in axes.out)
    if flat(*(_part(spread, axis) for axis in axes.contracted)):
        return "each device has a part of each sum"
    channels = math.prod(array.shape[axis] for axis in axes.out)
    if flat(*others) or channels % (ways(spread, out) * PANEL):
        return f"devices share panels of {PANEL} output channels"
    return ""
