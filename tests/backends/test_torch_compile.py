"""torch.compile, torch.export, torch.func and torch.autocast over wrapped models."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import policy_core as pc
import policy_torch

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
# torch's own compiler makes an instance of each autograd.Function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

POLICIES = ("float32", "mixed_bfloat16", *(f"{mode}_from_mixed_bfloat16" for mode in MODES))


def model_of(policy: str) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)]
    return pc.wrap(nn.Sequential(*layers), policy)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_evaluation(policy: str) -> None:
    """Batches of 1, 2, 3 and 5 take at most 2 compilations of one whole graph, with eager's bits."""
    model = model_of(policy).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for batch in (1, 2, 3, 5):
            x = torch.randn(batch, 16)
            assert torch.equal(compiled(x), model(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_training(policy: str) -> None:
    """Compiled training gives eager's outputs, gradients and delayed-scaling state, step by step."""
    model = model_of(policy)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, 16, requires_grad=True)
        z = x.detach().clone().requires_grad_()
        y, wanted = compiled(x), eager(z)
        y.float().square().sum().backward()
        wanted.float().square().sum().backward()
        assert torch.equal(y, wanted)
        assert x.grad is not None
        assert (x.grad - z.grad).abs().max() <= 0.02 * z.grad.abs().max()
    for (name, ours), theirs in zip(
        model.state_dict().items(), eager.state_dict().values(), strict=True
    ):
        assert torch.equal(ours.float(), theirs.float()), name


# torch 2.13's inductor imports deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", ["int8_from_mixed_bfloat16", "float8_from_mixed_bfloat16"])
def test_inductor(policy: str) -> None:
    """The default compiler gives eager's results within the compute dtype."""
    model = model_of(policy)
    wanted = copy.deepcopy(model)
    x = torch.randn(3, 16)
    y = torch.compile(model, fullgraph=True)(x)
    y.float().sum().backward()
    assert (y - wanted(x)).float().abs().max() <= 0.05


@pytest.mark.parametrize("policy", POLICIES)
def test_export(policy: str) -> None:
    """An exported program with a dynamic batch gives the model's numbers."""
    model = model_of(policy).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (torch.randn(3, 16),), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        for rows in (2, 3, 7):
            x = torch.randn(rows, 16)
            assert torch.equal(program.module()(x), model(x))


@pytest.mark.parametrize("policy", POLICIES)
def test_vmap(policy: str) -> None:
    """`vmap` over a batch of batches agrees with a loop, with and without gradients."""
    model = model_of(policy).eval()
    x = torch.randn(4, 3, 16)
    wanted = torch.stack([model(part) for part in x])
    with torch.no_grad():
        assert (torch.func.vmap(model)(x) - wanted).float().abs().max() <= 0.05
    y = torch.func.vmap(model)(x)
    assert (y - wanted).float().abs().max() <= 0.05
    gradient = torch.func.vmap(torch.func.grad(lambda part: model(part).float().sum()))(x)
    assert gradient.shape == x.shape


@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_around(policy: str) -> None:
    """Inside `torch.autocast` a layer's policy decides; the weight's gradient stays float32."""
    model = model_of(policy)
    plain = model(torch.ones(2, 16))
    again = model_of(policy)
    with torch.autocast("cpu", torch.bfloat16):
        y = again(torch.ones(2, 16))
    assert y.dtype == plain.dtype
    assert torch.equal(y, plain)
    y.float().sum().backward()
    assert {p.grad.dtype for p in again.parameters() if p.grad is not None} == {torch.float32}


def test_compiled_checkpoints_count_once() -> None:
    """A checkpointed segment inside a compiled function makes one entry a step and role."""
    layer = pc.wrap(nn.Linear(8, 8), "float8_from_float32")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False).relu().sum()

    for _ in range(2):
        step(torch.randn(4, 8, requires_grad=True)).backward()
    for role in ("input", "weight", "output_grad"):
        assert (getattr(layer, f"{role}_amax_history") > 0).sum() == 2


def test_compiled_training_shares_the_amax() -> None:
    """With `share_amax` the collectives are in the compiled graph, and the state is eager's."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model, eager = (policy_torch.share_amax(model_of("float8_from_float32")) for _ in "ab")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            x = torch.randn(4, 16)
            compiled(x).sum().backward()
            eager(x).sum().backward()
        for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        torch.distributed.destroy_process_group()
