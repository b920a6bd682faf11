"""Delayed-scaling state in a layer's buffers: when it moves, and what it gives."""

from typing import Any

import torch
from torch import nn

from policy_core import _scaling
from policy_core._backend import model_backend

from . import _kernels
from ._ops import ops_for

State = tuple[torch.Tensor, torch.Tensor]
"""The buffers of one tensor role: the scale, shape (), and the amax history, shape (length,)."""


def state_of(module: nn.Module, role: str) -> State:
    """Gives a role's buffers."""
    # Past nn.Module's slow way to attributes.
    buffers: Any = module._buffers
    return buffers[f"{role}_scale"], buffers[f"{role}_amax_history"]


def is_training_call(module: nn.Module, rows: int) -> bool:
    """Says whether a call is a training call that really runs, so that the state moves.

    A checkpointed segment runs twice, and counts once. `use_reentrant=False` runs forward with
    gradients, and again inside backward: the first counts. `use_reentrant=True` runs forward
    without gradients, and again with them inside backward: the second counts.
    """
    if not (module.training and torch.is_grad_enabled()) or rows == 0:
        return False
    if torch.compiler.is_compiling():
        return True
    if torch._C._current_graph_task_id() == -1:
        return True
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


def share_amax(model: nn.Module, group: Any = None) -> nn.Module:
    """Makes the amax of every delayed-scaling layer the maximum over data-parallel replicas.

    Call it on each replica after `torch.distributed` is initialized and the model is wrapped. All
    replicas must call the same layers in the same order: each call waits for the others.

    Args:
        model: A wrapped model, of torch or of Keras on torch.
        group: The process group of the replicas; None for all processes. NCCL users give one of
            its own (`torch.distributed.new_group()`), apart from that of the gradients.

    Returns:
        The model.

    Raises:
        RuntimeError: `torch.distributed` is not initialized.
        ValueError: The model has no layer with delayed scaling.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("Call torch.distributed.init_process_group before share_amax.")
    group = dist.group.WORLD if group is None else group
    # Not model.modules(): a Keras model does not tell torch of all its layers.
    layers = [site.layer for site in model_backend(model).walk(model)]
    layers = [layer for layer in layers if hasattr(layer, "output_grad_amax_history")]
    if not layers:
        raise ValueError("Expected a model with a layer that trains under 'float8'. There is none.")
    for layer in layers:
        # Past nn.Module's setattr; copies and pickles drop it, as they do the process group.
        layer.__dict__["_policy_group"] = group
    return model


def _can_branch(x: torch.Tensor) -> bool:
    """Says whether a decision may depend on values: on a CPU, and not while torch is tracing."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active()


@torch.no_grad()
def delayed_scale(
    state: State, x: torch.Tensor, dtype: str, moving: bool, group: Any = None
) -> torch.Tensor:
    """Gives the scale for a tensor, and in training moves the state of its role.

    Args:
        state: The role's buffers, changed in place.
        x: A matrix of floats.
        dtype: The float8 format of its codes.
        moving: Whether this is a training call.
        group: A process group over whose replicas the amax is a maximum; None for none.

    Returns:
        float32 of shape ().
    """
    if not moving and _can_branch(x):
        # inference_scale without what it would not use.
        if state[1].max().item() > 0:
            return state[0].clone()
        return _kernels.scale_f8(x, dtype)
    ops = ops_for(x)
    before = _scaling.AmaxState(*state)
    largest = ops.amax_of_all(x)
    if not moving:
        scale: torch.Tensor = _scaling.inference_scale(ops, before, largest, dtype)
        return scale
    if group is not None:
        import torch.distributed as dist

        largest = largest.clone()
        # A NaN has no maximum that all backends agree on; an infinity has, and is not recorded.
        largest = torch.where(torch.isnan(largest), float("inf"), largest)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    scale, after = _scaling.training_scale(ops, before, largest, dtype)
    state[0].copy_(after.scale)
    state[1].copy_(after.amax_history)
    return scale


def inference_scale_of(module: nn.Module, role: str, x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Gives the scale that a layer uses outside training."""
    return delayed_scale(state_of(module, role), x, dtype, False)


class GradientScale:
    """Gives the scale of an output gradient; in training with delayed scaling it moves the state.

    Args:
        state: The state's two buffers; None for a scale from the values at hand.
        moving: Whether the call is a training call.
        group: Replicas over which the amax is a maximum; None for none.
    """

    def __init__(self, state: State | None, moving: bool, group: Any) -> None:
        self.state = state
        self.moving = moving
        self.group = group

    def __call__(self, dy: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            return _kernels.scale_f8(dy, "float8_e5m2")
        moving = self.moving and dy.shape[0] > 0
        return delayed_scale(self.state, dy, "float8_e5m2", moving, self.group)
