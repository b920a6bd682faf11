"""Data parallelism and sharding of wrapped models, in two processes over gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import policy_core as pc
import policy_torch

COMMON = """
import torch, torch.distributed as dist, warnings
from torch import nn
import policy_core as pc, policy_torch
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

def model_of(policy):
    torch.manual_seed(0)
    return pc.wrap(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), policy)

def batch(step):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    x[0, 0] = 10.0 + step  # the amax is on rank 0
    return x[:4] if rank == 0 else x[4:]

def same_on_both(tensor):
    pair = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(pair, tensor.contiguous())
    assert torch.equal(*pair), (rank, pair)
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel
model = policy_torch.share_amax(model_of("float8_from_float32"))
# Without buffers sent from rank 0: equal states must come from the amax alone.
replica = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(replica.parameters(), 0.01)
for step in range(3):
    optimizer.zero_grad()
    loss = replica(batch(step)).square().mean() * (1 + rank)
    loss.backward()
    optimizer.step()
for tensor in (*model.buffers(), *model.parameters()):
    same_on_both(tensor.detach())
assert model[0].input_amax_history[:3].tolist() == [12.0, 11.0, 10.0], model[0].input_amax_history[:3]
"""

FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
for policy in ("mixed_bfloat16", "float8_from_float32", "float8_from_mixed_bfloat16"):
    whole, model = model_of(policy), model_of(policy)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if "float8" in policy:
        policy_torch.share_amax(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    reference = torch.optim.SGD(whole.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        x[0, 0] = 10.0 + step
        whole(x).float().square().mean().backward()
        reference.step()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters()):
        full = ours.full_tensor()
        assert (full - theirs).abs().max() <= 0.02 * theirs.abs().max(), (policy, name)
    if "float8" in policy:
        for name in ("input_amax_history", "weight_amax_history"):
            ours, theirs = getattr(model[0], name)[:3], getattr(whole[0], name)[:3]
            assert torch.allclose(ours, theirs, rtol=0.01), (policy, name, ours, theirs)
    try:
        pc.wrap(model, "bfloat16", on_wrapped="replace")
    except ValueError as error:
        assert "before fully_shard" in str(error)
    else:
        raise AssertionError("a sharded model was wrapped")
"""

END = """
dist.barrier()
dist.destroy_process_group()
import os
os._exit(0)  # gloo's threads may outlive the group, and then end the interpreter with an abort
"""


def in_two_processes(script: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = tmp_path / "script.py"
    path.write_text(COMMON + script + END)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)


def test_data_parallel_replicas_share_the_amax(tmp_path: Path) -> None:
    """Under DDP the amax is the maximum over replicas, so all states and weights stay equal."""
    in_two_processes(DDP, tmp_path)


def test_fully_sharded_models_train(tmp_path: Path) -> None:
    """`fully_shard` over a wrapped model trains it as one process would; wrapping after it is refused."""
    in_two_processes(FSDP, tmp_path)


def test_share_amax_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group, or a layer with delayed scaling, `share_amax` is an error."""
    model = pc.wrap(nn.Linear(4, 4), "int8_from_float32")
    with pytest.raises(RuntimeError, match="init_process_group"):
        policy_torch.share_amax(model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="There is none"):
        policy_torch.share_amax(model, group=object())
