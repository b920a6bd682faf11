"""Ties, hooks, memory: what stays true of a torch model that is wrapped."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import policy_core as pc
import policy_torch
from policy_core.errors import LayerError

from .torch_models import Tied, encoder, inputs, seeded


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "int8_from_float32"])
def test_tied_weights_stay_tied(policy: str) -> None:
    """A weight that two layers share is converted once, and shared after copies, moves and back."""
    model = pc.wrap(Tied(), policy)
    found = pc.report(model)
    assert found.rows[1].bytes_after == 0
    assert found.rows[1].bytes_before == 0
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.half()):
        assert pc.report(again).rows[1].bytes_after == 0
    assert len(list(pc.unwrap(model).parameters())) == 1
    assert model.head.weight is model.embedding.weight


def test_tied_float8_codes_survive_pickle() -> None:
    """Tied float8 codes are one tensor again after a pickle, which torch alone cannot read."""
    model = pc.wrap(Tied(), "float8/weight_only_from_float32")
    again = pickle.loads(pickle.dumps(model))
    assert pc.report(again).rows[1].bytes_after == 0
    assert torch.equal(again(torch.arange(4)), model(torch.arange(4)))


def test_tied_weights_need_one_policy() -> None:
    """A policy on only one of two layers that share a weight is refused, and nothing changes."""
    model = Tied()
    with pytest.raises(LayerError, match="share one weight"):
        pc.wrap(model, {"head": "int8_from_float32"})
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embedding.weight


def test_hooks_and_references_stay() -> None:
    """Hooks registered before wrapping still run, and references to layers are the wrapped ones."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    layer, seen = model[0], []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    pc.wrap(model, "int8_from_float32")
    assert model[0] is layer
    model(inputs(2, 8).requires_grad_()).sum().backward()
    assert seen == ["forward", "backward"]


def test_float_weights_are_freed_one_by_one() -> None:
    """Wrapping 20 layers never holds more than one layer above the start; no float weight lives."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(20)))
    alive = [weakref.ref(layer.weight) for layer in model]
    dead_at_each_layer: list[int] = []
    quantize = policy_torch._wrap.quantize

    def counting(*args: Any) -> Any:
        gc.collect()
        dead_at_each_layer.append(sum(ref() is None for ref in alive))
        return quantize(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_torch._wrap, "quantize", counting)
        pc.wrap(model, "int8_from_float32")
    assert dead_at_each_layer == list(range(20))
    gc.collect()
    assert all(ref() is None for ref in alive)
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert size <= 0.3 * 20 * 256 * 256 * 4


def test_parameters_are_floats_for_any_optimizer() -> None:
    """`parameters()` of a quantized model holds floats alone, and an optimizer steps over them."""
    model = pc.wrap(seeded(encoder), "int8_from_float32")
    assert all(p.is_floating_point() and p.element_size() > 1 for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    before = model.layers[0].linear1.bias.detach().clone()
    model(inputs(2, 5, 16)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, model.layers[0].linear1.bias)
