"""Run by check_distribution.py in two processes: DistributedDataParallel over wrapped Keras models."""

import os

import keras
import numpy as np
import torch
import torch.distributed as dist
from distribution_states import state_of
from torch.nn.parallel import DistributedDataParallel

import policy_core as pc
import policy_torch

POLICIES = [
    "mixed_bfloat16",
    "int8_from_float32",
    "int8/weight_only_from_float32",
    "float8_from_float32",
    "float8/dynamic_from_float32",
    "float8/weight_only_from_float32",
]


def mlp():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((8,)), *layers])


def train(model, call, x):
    """Gives the losses of three steps of SGD."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.02)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(x, training=True).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(policy, x, rank):
    """Two replicas, each with half of a batch, train as one process with all of it."""
    model, whole = pc.wrap(mlp(), policy), pc.wrap(mlp(), policy)
    if policy.startswith("float8_"):
        policy_torch.share_amax(model)
    losses = train(model, DistributedDataParallel(model), x[rank::2])
    wanted = train(whole, whole, x)
    both = [None, None]
    dist.all_gather_object(both, (losses, {n: a.tobytes() for n, a in state_of(model).items()}))
    assert both[0][1] == both[1][1], f"{policy}: replicas differ"
    np.testing.assert_allclose(np.mean([both[0][0], both[1][0]], 0), wanted, rtol=0.03)
    ours, theirs = state_of(model), state_of(whole)
    for name in ours:
        # The gradient of a loss that is a mean over half the rows is twice as large.
        if policy != "mixed_bfloat16" and "output_grad" not in name and "dynamic" not in policy:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 10  # the largest value is in one replica's share
    for policy in POLICIES:
        check(policy, x, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the group, and then end the interpreter with an abort


if __name__ == "__main__":
    main()
