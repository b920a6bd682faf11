"""Training wrapped torch models: gradients, delayed-scaling state, and when it moves."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import policy_core as pc
import policy_numpy as pn

TRAINABLE = ("float8_from_float32", "float8/dynamic_from_float32")
ROLES = ("input", "weight", "output_grad")


def wrapped(policy: str, k: int = 8, n: int = 5) -> Any:
    torch.manual_seed(0)
    return pc.wrap(nn.Linear(k, n), policy)


def inputs(m: int = 6, k: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def history(layer: Any, role: str, count: int = 4) -> list[float]:
    return [round(v, 4) for v in getattr(layer, f"{role}_amax_history")[:count].tolist()]


def entries(layer: Any) -> dict[str, int]:
    """Gives how many calls each role has recorded."""
    return {role: int((getattr(layer, f"{role}_amax_history") > 0).sum()) for role in ROLES}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(b, before[n]) for n, b in model.named_buffers())


# Gradients.


@pytest.mark.parametrize("m", [0, 1, 2, 5])
@pytest.mark.parametrize(("k", "n"), [(33, 17), (32, 15)])
@pytest.mark.parametrize("policy", TRAINABLE)
def test_gradients_are_the_references(policy: str, k: int, n: int, m: int) -> None:
    """float8 gradients, of sizes that no tile divides, are numpy's within a float32 sum."""
    layer, x = wrapped(policy, k, n), inputs(m, k)
    reference = pn.Dense(k, n)
    reference.tensors["weight"] = layer.weight.detach().numpy().copy()
    reference.tensors["bias"] = layer.bias.detach().numpy().copy()
    pc.wrap(reference, policy)
    assert reference.wrapping is not None
    plan = reference.wrapping.plan
    y, operands, state = pn.linear(x.detach().numpy(), reference.tensors, plan, training=True)
    reference.tensors.update(state)
    dy = np.random.default_rng(2).standard_normal((m, n), np.float32)
    dx, gradients, _ = pn.linear_gradient(dy, operands, reference.tensors, plan)
    ours = layer(x)
    ours.backward(torch.tensor(dy))
    assert np.allclose(ours.detach(), y, rtol=1e-5, atol=1e-5)
    assert np.allclose(x.grad, dx, rtol=1e-5, atol=1e-5)
    assert np.allclose(layer.weight.grad, gradients["weight"], rtol=1e-5, atol=1e-5)
    assert np.allclose(layer.bias.grad, gradients["bias"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only", "float8/weight_only"])
@pytest.mark.parametrize("source", ["float32", "mixed_bfloat16"])
def test_gradient_passes_layers_that_keep_codes(source: str, mode: str) -> None:
    """The input's gradient passes the dequantized weight; the bias has one, codes have none."""
    layer, x = wrapped(f"{mode}_from_{source}"), inputs()
    dy = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    y = layer(x)
    y.backward(dy.to(y.dtype))
    wanted = dy.to(y.dtype).float() @ layer.weight
    assert x.grad is not None
    assert (x.grad - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert layer.bias.grad.dtype == torch.float32
    assert [n for n, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("policy", [*TRAINABLE, "float8_from_mixed_bfloat16"])
def test_frozen_layers_pass_the_gradient(policy: str) -> None:
    """Backward through a frozen float8 layer gives the input's gradient and moves no state."""
    layer = wrapped(policy)
    layer(inputs()).float().sum().backward()
    pc.freeze(layer)
    before = buffers(layer)
    x = inputs()
    layer(x).float().sum().backward()
    wanted = layer.weight.sum(0).expand(6, -1)
    assert x.grad is not None
    assert (x.grad - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert unchanged(layer, before)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", "mixed_float16", "float8_from_mixed_bfloat16", *TRAINABLE]
)
def test_gradients_arrive_in_the_variable_dtype(policy: str) -> None:
    """Under every policy the parameters' gradients have the parameters' dtype."""
    layer = wrapped(policy)
    layer(inputs()).float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    assert {p.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("policy", TRAINABLE)
def test_frozen_parameters_get_no_gradient(policy: str) -> None:
    """A weight that is not to be trained gets no gradient, and passes the input's."""
    layer, x = wrapped(policy), inputs()
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer(x.detach())


def test_grad_scaler_skips_an_overflow() -> None:
    """With `torch.amp.GradScaler`, a loss that overflows float16 skips the step and halves the scale."""
    model = wrapped("mixed_float16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    before = model.weight.detach().clone()
    for factor, moves in ((1e5, False), (1e-3, True)):
        optimizer.zero_grad()
        loss = (model(inputs()) * factor).float().sum()
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) is not moves
        assert (scaler.get_scale() < scale) is not moves
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", *TRAINABLE])
def test_training_lowers_the_loss(policy: str) -> None:
    """A few steps of an ordinary loop train a wrapped model."""
    torch.manual_seed(0)
    model = pc.wrap(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)), policy)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x = inputs(64).detach()
    target = x.square().sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# When the state moves.


def test_training_moves_all_three_states() -> None:
    """A training step records the amax of the input, the weight and the output gradient."""
    layer, x = wrapped("float8_from_float32"), inputs()
    (layer(x) * 3).sum().backward()
    assert history(layer, "input", 2) == [round(x.detach().abs().max().item(), 4), 0]
    assert history(layer, "weight", 2) == [round(layer.weight.detach().abs().max().item(), 4), 0]
    assert history(layer, "output_grad", 2) == [3, 0]


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode", "no rows"])
def test_other_calls_leave_the_state(how: str) -> None:
    """Evaluation, calls without gradients, and calls without rows change no buffer."""
    layer = wrapped("float8_from_float32")
    layer(inputs()).sum().backward()
    before = buffers(layer)
    x = inputs(0 if how == "no rows" else 3, seed=5) * 100
    if how == "eval":
        layer.eval()
        layer(x).sum().backward()
    elif how == "no_grad":
        with torch.no_grad():
            layer(x)
    elif how == "inference_mode":
        with torch.inference_mode():
            layer(x)
    else:
        layer(x).sum().backward()
    assert unchanged(layer, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_counts_once(use_reentrant: bool) -> None:
    """A checkpointed segment, which runs twice, makes one entry a role, and the same gradients."""
    plain = nn.Sequential(wrapped("float8_from_float32"), nn.Tanh())
    kept = copy.deepcopy(plain)
    for step in range(3):
        x, z = inputs(seed=step), inputs(seed=step)
        plain(x).square().sum().backward()
        checkpoint(kept, z, use_reentrant=use_reentrant).square().sum().backward()
        assert entries(kept[0]) == dict.fromkeys(ROLES, step + 1)
        assert z.grad is not None
        assert (z.grad - x.grad).abs().max() <= 0.1 * x.grad.abs().max()
    if not use_reentrant:
        assert unchanged(kept, buffers(plain))
        assert torch.equal(z.grad, x.grad)


# The first run of the outer segment has no gradients, which the inner checkpoint remarks.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nested_checkpoints_count_once(use_reentrant: bool) -> None:
    """A checkpoint inside a checkpoint counts each training call once."""
    inner = wrapped("float8_from_float32", 8, 8)
    outer = wrapped("float8_from_float32", 8, 8)

    def segment(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, outer(x), use_reentrant=use_reentrant)

    checkpoint(segment, inputs(), use_reentrant=use_reentrant).sum().backward()
    assert entries(inner) == dict.fromkeys(ROLES, 1)
    assert entries(outer) == dict.fromkeys(ROLES, 1)


def test_micro_batches_are_calls() -> None:
    """Under gradient accumulation each micro-batch makes an entry, and gradients add up."""
    layer = wrapped("float8_from_float32")
    for step in range(3):
        layer(inputs(seed=step)).sum().backward()
    assert entries(layer) == dict.fromkeys(ROLES, 3)
    assert torch.allclose(layer.bias.grad, torch.full((5,), 18.0))


def test_a_layer_used_twice_makes_two_entries() -> None:
    """Two calls in one step record two amax values in every role, nothing is summed."""
    layer = wrapped("float8_from_float32", 8, 8)
    y = layer(torch.full((1, 8), 2.0))
    (layer(torch.full((1, 8), 3.0)) + 5 * y).sum().backward()
    assert history(layer, "input", 3) == [3, 2, 0]
    assert sorted(history(layer, "output_grad", 3)) == [0, 1, 5]


def test_a_model_used_inside_itself_trains() -> None:
    """A layer whose output is its own next input has gradients from both calls."""
    layer = wrapped("float8_from_float32", 8, 8)
    layer(layer(inputs())).sum().backward()
    assert entries(layer) == dict.fromkeys(ROLES, 2)


def test_unused_branch_keeps_its_state() -> None:
    """A branch that is not called in ten steps has the state that it had."""
    used, unused = wrapped("float8_from_float32"), wrapped("float8_from_float32")
    unused(inputs()).sum().backward()
    before = buffers(unused)
    for _ in range(10):
        used(inputs()).sum().backward()
    assert unchanged(unused, before)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_bad_gradient_does_not_poison_the_state(value: float) -> None:
    """An output gradient that is not finite shows in the gradients, and not in the state."""
    layer = wrapped("float8_from_float32")
    layer(inputs()).sum().backward()
    layer.zero_grad()
    dy = torch.ones(6, 5)
    dy[1, 2] = value
    layer(inputs()).backward(dy)
    assert history(layer, "output_grad", 2) == [1, 0]
    layer.zero_grad()
    layer(inputs()).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_first_call_is_not_clipped_and_step_4_recovers() -> None:
    """Inputs up to 1e4 are scaled in step 1; an infinity in step 3 is gone in step 4."""
    layer = wrapped("float8_from_float32")
    for step in range(1, 5):
        x = (inputs(seed=step) * 1e4).detach()
        wanted = x @ layer.weight.detach().T
        if step == 3:
            x[0, 0] = float("inf")
        y = layer(x)
        y.sum().backward()
        if step != 3:
            assert (y - wanted).abs().max() <= 0.1 * wanted.abs().max()


def step_of(model: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
    model(x).float().square().sum().backward()


def test_backward_twice_through_one_graph() -> None:
    """`retain_graph=True` and a second backward work; each backward is a call for the gradient."""
    layer, x = wrapped("float8_from_float32"), inputs()
    y = layer(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert entries(layer) == {"input": 1, "weight": 1, "output_grad": 2}


def test_length_of_the_history_is_the_policys() -> None:
    """A policy's amax_history_length is that of the buffers, and the oldest entry falls out."""
    policy = pc.QuantizedFloat8DTypePolicy("float8", "float32", 2)
    layer = pc.wrap(nn.Linear(8, 5), policy)
    for value in (1.0, 2.0, 3.0):
        step_of(layer, torch.full((1, 8), value))
    assert history(layer, "input") == [3, 2]


@pytest.mark.parametrize("functional", [False, True])
def test_second_derivatives_are_refused_or_right(functional: bool) -> None:
    """A second derivative through a float8 layer that trains raises; through a frozen one it comes."""
    layer = pc.wrap(nn.Linear(8, 4), "float8/dynamic_from_float32").eval()
    x = inputs(3, 8).requires_grad_(not functional)

    def second(layer: Any) -> torch.Tensor:
        if functional:
            loss = lambda x: layer(x).pow(2).sum()  # noqa: E731
            return torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
        (first,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    with pytest.raises(RuntimeError, match="first derivatives only"):
        second(layer)
    frozen = pc.freeze(layer)
    weight = frozen.weight.detach()
    wanted = (2 * torch.ones(3, 8)) @ weight.T @ weight
    torch.testing.assert_close(second(frozen), wanted)
