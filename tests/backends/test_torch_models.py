"""torch models of all kinds: what is quantized, what is left out and why, and what stays true."""

import copy
import dataclasses
import gc
import os
import pickle
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import policy_core as pc
import policy_torch
from policy_core.errors import LayerError
from policy_torch import LayerAdapter

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
FORMS = ("float32", "mixed_bfloat16", *(f"{mode}_from_float32" for mode in MODES))


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def notes(model: nn.Module) -> dict[str, str]:
    return {row.path: row.note for row in pc.report(model).rows}


def quantized(model: nn.Module) -> dict[str, bool]:
    return {row.path: row.quantized for row in pc.report(model).rows}


def close(y: torch.Tensor, wanted: torch.Tensor, part: float = 0.1) -> bool:
    """Says whether two tensors differ by at most a part of the largest value."""
    return bool((y.float() - wanted).abs().max() <= part * wanted.abs().max())


# Layers.


@pytest.mark.parametrize("policy", FORMS)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 11)),
        (lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), (2, 4, 11)),
        (lambda: nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), padding=(2, 0)), (2, 4, 9, 8)),
        (lambda: nn.Conv2d(4, 6, 3, padding_mode="reflect", padding=1, bias=False), (4, 9, 8)),
    ],
    ids=["conv1d", "conv1d-circular", "conv2d", "conv2d-unbatched"],
)
def test_convolutions_follow_every_policy(make: Any, shape: Any, policy: str) -> None:
    """A wrapped convolution gives the float one's output within the codes' precision."""
    layer, x = seeded(make), inputs(*shape).requires_grad_()
    wanted = layer(x).detach()
    pc.wrap(layer, policy)
    y = layer(x)
    assert y.shape == wanted.shape
    assert close(y, wanted)
    assert pc.report(layer).rows[0].quantized is ("8" in policy and "mixed" not in policy)
    y.float().sum().backward()
    assert x.grad is not None


def test_grouped_convolution_is_left_out() -> None:
    """A convolution with groups follows the source policy, and the report says why."""
    layer = pc.wrap(nn.Conv2d(4, 4, 3, groups=4), "int8_from_mixed_bfloat16")
    assert "4 groups" in notes(layer)[""]
    assert layer(inputs(1, 4, 5, 5)).dtype == torch.bfloat16


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8_from_mixed_bfloat16"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_in_the_compute_dtype(kind: Any, policy: str) -> None:
    """Recurrent layers have no quantized form; they follow the source policy and train."""
    layer = pc.wrap(kind(8, 4, num_layers=2), policy)
    y, state = layer(inputs(3, 2, 8))
    assert y.dtype == torch.bfloat16
    states = state if isinstance(state, tuple) else (state,)
    assert {s.dtype for s in states} == {torch.bfloat16}
    y.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    if "int8" in policy:
        assert "no quantized form" in notes(layer)[""]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LayerNorm(8), (4, 8)),
        (lambda: nn.RMSNorm(8), (4, 8)),
        (lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
        (lambda: nn.BatchNorm1d(8), (4, 8)),
        (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
        (lambda: nn.InstanceNorm1d(8, affine=True), (4, 8, 9)),
    ],
    ids=["layer", "rms", "group", "batch1d", "batch2d", "instance"],
)
def test_norms_compute_in_float32(make: Any, shape: Any, policy: str) -> None:
    """A norm of inputs near float16's largest is finite, in the compute dtype, and near float32's."""
    x = (inputs(*shape) * 2000 + 6e4).half()
    wanted = seeded(make)(x.float())
    layer = pc.wrap(seeded(make), policy)
    y = layer(x)
    assert y.dtype == getattr(torch, policy.removeprefix("mixed_"))
    assert close(y, wanted, 0.02)
    assert "float32 inside" in notes(layer)[""]


def test_embedding_refuses_bad_ids() -> None:
    """Ids out of the table and ids that are no integers are errors, as in the plain layer."""
    table = pc.wrap(nn.Embedding(10, 4), "float8/weight_only_from_float32")
    assert table(torch.tensor([[1, 2]], dtype=torch.int32)).shape == (1, 2, 4)
    for ids in (torch.tensor([-1]), torch.tensor([10])):
        with pytest.raises((IndexError, RuntimeError)):
            table(ids)
    with pytest.raises(TypeError, match="Expected ids of dtype int64"):
        table(torch.ones(2))


def test_large_ids_are_exact_under_bfloat16() -> None:
    """An integer id passes a bfloat16 policy untouched: 2909 stays 2909."""
    table = pc.wrap(nn.Embedding(3000, 2), "mixed_bfloat16")
    assert close(table(torch.tensor(2909)), table.weight[2909].detach(), 0.01)


class Doubled(nn.Linear):
    """Overrides forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """Does not override forward."""


def test_subclasses_are_judged_by_what_they_override() -> None:
    """A subclass that keeps forward is quantized; one that overrides it is left out, and works."""
    model = nn.Sequential(Named(8, 8), Doubled(8, 8))
    pc.wrap(model, "int8_from_mixed_bfloat16")
    assert quantized(model) == {"0": True, "1": False}
    assert "Doubled overrides forward" in notes(model)["1"]
    assert model(inputs(2, 8)).dtype == torch.bfloat16
    assert isinstance(model[0], Named)


def test_registered_layer_is_quantized() -> None:
    """`register_layer` says how a class of anyone's own computes around its product."""

    class Tripled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * F.linear(x, self.weight, self.bias)

    adapter = LayerAdapter(kind="linear", forward=lambda layer, linear, x: 3 * linear(x))
    pc.register_layer(Tripled, adapter)
    pc.register_layer(Tripled, adapter)
    layer, x = seeded(lambda: Tripled(8, 5)), inputs(4, 8)
    wanted = layer(x)
    pc.wrap(layer, "int8_from_float32")
    assert quantized(layer) == {"": True}
    assert close(layer(x), wanted, 0.02)
    with pytest.raises(ValueError, match="registered already"):
        pc.register_layer(Tripled, LayerAdapter(kind="other"))
    with pytest.raises(TypeError, match="Expected a subclass"):
        pc.register_layer(torch.Tensor, adapter)
    with pytest.raises(TypeError, match=r"Expected a policy_torch\.LayerAdapter"):
        pc.register_layer(Tripled, 3)
    with pytest.raises(ValueError, match="Expected kind"):
        LayerAdapter(kind="dense")  # type: ignore[arg-type]


def conv1d_of_hugging_face() -> type[nn.Module]:
    """Gives a class as transformers has it: a linear layer with a weight of shape (in, out)."""

    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf = nf
            self.weight = nn.Parameter(torch.randn(nx, nf))
            self.bias = nn.Parameter(torch.randn(nf))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.size()[:-1], self.nf)
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)

    Conv1D.__module__ = "transformers.pytorch_utils"
    return Conv1D


@pytest.mark.parametrize("policy", FORMS)
def test_hugging_face_conv1d(policy: str) -> None:
    """transformers' Conv1D is a linear layer, also on its way back, and stored as (out, in)."""
    layer, x = seeded(lambda: conv1d_of_hugging_face()(6, 8)), inputs(2, 3, 8)
    wanted = layer(x).detach()
    before = layer.weight.detach().clone()
    pc.wrap(layer, policy)
    assert close(layer(x), wanted)
    assert tuple(pc.backend("torch").walk(layer)[0].tensors["weight"].shape) == (6, 8)
    assert layer.weight.shape == (8, 6)
    pc.freeze(layer)
    assert close(layer(x), wanted)
    pc.unwrap(layer)
    assert close(layer.weight.detach(), before)
    assert layer.weight.is_contiguous()


def test_parent_that_reads_a_childs_weight() -> None:
    """A LoRA-style parent gets the dequantized weight of a quantized child, and trains its own."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 6)
            self.low = nn.Parameter(torch.zeros(6, 2))
            self.high = nn.Parameter(torch.ones(2, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.base.weight + self.low @ self.high
            return F.linear(x, weight.to(x.dtype), self.base.bias)

    model, x = seeded(Adapted), inputs(4, 8)
    wanted = model(x).detach()
    pc.wrap(model, "int8_from_float32")
    y = model(x)
    assert close(y, wanted, 0.02)
    y.sum().backward()
    assert model.low.grad is not None
    assert model.base.weight.dtype == torch.float32


def test_parameters_of_a_container_are_read_in_the_compute_dtype() -> None:
    """A module with children and parameters of its own is a layer too."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(1, 8))
            self.proj = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.token.dtype == torch.bfloat16
            return self.proj(torch.cat([x, self.token]))

    model = pc.wrap(Tokens(), "mixed_bfloat16")
    assert model(inputs(3, 8)).shape == (4, 4)
    assert model.token.dtype == torch.float32
    assert [row.path for row in pc.report(model).rows] == ["", "proj"]


def test_parameter_lists_belong_to_the_module_that_reads_them() -> None:
    """Parameters in a ParameterList or ParameterDict are read in the compute dtype too."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(8, 4), torch.ones(8, 4)])
            self.named = nn.ParameterDict({"shift": torch.ones(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.parts[0] + x @ self.parts[1] + self.named["shift"]

    model = pc.wrap(Mixture(), "mixed_bfloat16")
    y = model(inputs(3, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    (row,) = pc.report(model).rows
    assert row.bytes_after == (2 * 32 + 4) * 4


def test_threads_may_share_a_model() -> None:
    """Several threads that call one wrapped model at once get the results of one thread."""
    model = pc.wrap(nn.LSTM(8, 8), "mixed_bfloat16")
    x = inputs(20, 2, 8)
    with torch.no_grad():
        wanted = model(x)[0]

    def call(_: int) -> bool:
        with torch.no_grad():
            return torch.equal(model(x)[0], wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(copy.deepcopy(model)(x)[0], wanted)


def test_packed_sequences() -> None:
    """A recurrent layer takes a packed sequence, and gives one in the compute dtype."""
    model = pc.wrap(nn.GRU(8, 4), "mixed_bfloat16")
    packed = nn.utils.rnn.pack_padded_sequence(inputs(5, 2, 8), torch.tensor([5, 3]))
    y, _ = model(packed)
    assert isinstance(y, nn.utils.rnn.PackedSequence)
    assert y.data.dtype == torch.bfloat16


# Attention.


def encoder(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


# torch warns of the nested tensors on the fused path of its own plain encoder.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("policy", FORMS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_transformer_encoder(training: bool, policy: str) -> None:
    """An encoder's attention and linear layers compute as the report says, also outside training,
    where torch would pass them by on a fused path.
    """
    model = seeded(encoder).train(training)
    x = inputs(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
    with torch.set_grad_enabled(training):
        wanted = model(x, src_key_padding_mask=padding)
        pc.wrap(model, policy)
        y = model(x, src_key_padding_mask=padding)
    rows = {row.path: row for row in pc.report(model).rows}
    assert "layers/1/self_attn/in_proj" in rows
    assert "layers/1/self_attn/out_proj" in rows
    if "_from_" in policy:
        assert sum(row.quantized for row in rows.values()) == 8
    # Padding gives zeros on the fused path alone.
    keep = ~padding
    assert close(y[keep], wanted[keep], 0.15)
    called: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad():
        model(x)
    assert len(called) == 8


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("case", ["self", "cross", "causal", "float-mask", "padding", "unbatched"])
def test_attention_is_torchs(case: str, batch_first: bool, need_weights: bool) -> None:
    """A wrapped attention under float32 gives torch's outputs and weights for every mask."""
    plain = seeded(lambda: nn.MultiheadAttention(16, 4, batch_first=batch_first))
    plain.in_proj_bias.data.normal_()
    wrapped = pc.wrap(copy.deepcopy(plain), "float32")
    batch, length = 3, 5
    shape = (batch, length, 16) if batch_first else (length, batch, 16)
    q = inputs(*shape)
    k = v = q
    more: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": batch_first}
    if case == "cross":
        k, v = inputs(*shape, seed=2), inputs(*shape, seed=3)
    elif case == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        more |= {"attn_mask": mask, "is_causal": True}
    elif case == "float-mask":
        more["attn_mask"] = inputs(batch * 4, length, length)
    elif case == "padding":
        more["key_padding_mask"] = torch.arange(length).expand(batch, -1) > 2
        more["attn_mask"] = torch.ones(length, length).triu(1).bool()
    elif case == "unbatched":
        q = k = v = inputs(length, 16)
    wanted, wanted_weights = plain(q, k, v, **more)
    y, weights = wrapped(q, k, v, **more)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(weights, wanted_weights)


def test_attention_comes_back() -> None:
    """Unwrapping, copying and pickling keep an attention's class, parameters and order of state."""
    plain = seeded(lambda: nn.MultiheadAttention(16, 4))
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    parameter = plain.in_proj_weight
    wrapped = pc.wrap(plain, "mixed_bfloat16")
    assert isinstance(wrapped, nn.MultiheadAttention)
    assert wrapped.in_proj_weight is parameter
    for again in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        x = inputs(3, 2, 16)
        assert torch.equal(again(x, x, x)[0], wrapped(x, x, x)[0])
    pc.unwrap(wrapped)
    assert type(plain) is nn.MultiheadAttention
    assert plain.in_proj_weight is parameter
    assert list(plain.state_dict()) == list(state)
    assert all(torch.equal(state[n], t) for n, t in plain.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kdim": 8, "vdim": 8}, "another width"),
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
    ],
    ids=["kdim", "bias-kv", "zero-attn"],
)
def test_unusual_attention_is_left_out(arguments: dict[str, Any], reason: str) -> None:
    """An attention that has no quantized form says why, and follows the source policy as one layer."""
    layer = pc.wrap(nn.MultiheadAttention(16, 2, **arguments), "int8_from_mixed_bfloat16")
    (row,) = pc.report(layer).rows
    assert not row.quantized
    assert reason in row.note
    k = inputs(3, 2, arguments.get("kdim", 16))
    y, _ = layer(inputs(3, 2, 16), k, k)
    assert y.dtype == torch.bfloat16
    assert layer.out_proj.weight.dtype == torch.float32


def test_fused_paths_come_back() -> None:
    """Unwrapping switches torch's fused encoder path on again."""
    model = seeded(encoder).eval()
    before = [layer.activation_relu_or_gelu for layer in model.layers]
    pc.wrap(model, "int8_from_float32")
    assert not model.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [0, 0]
    pc.unwrap(model)
    assert model.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in model.layers] == before


# Ties, hooks, memory.


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


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


# State.


@pytest.mark.parametrize("policy", FORMS)
def test_state_dict_round_trip(policy: str) -> None:
    """A wrapped model's state_dict loads strictly into another wrapped model, with the same bits."""
    model = pc.wrap(seeded(encoder), policy)
    model(inputs(2, 5, 16)).sum().backward()
    other = pc.wrap(encoder(), policy)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        x = inputs(2, 5, 16)
        assert torch.equal(other.eval()(x), model.eval()(x))


@pytest.mark.parametrize("policy", FORMS)
def test_float_state_dict_loads_into_a_wrapped_model(policy: str) -> None:
    """A float checkpoint loads strictly into a wrapped model, as if it had been wrapped after it."""
    source = seeded(encoder)
    model = pc.wrap(encoder(), policy)
    model.load_state_dict(source.state_dict())
    wanted = pc.wrap(source, policy)
    with torch.no_grad():
        x = inputs(2, 5, 16)
        assert torch.equal(model.eval()(x), wanted.eval()(x))


def test_half_a_state_dict_is_refused() -> None:
    """A checkpoint that holds a part of the state is an ordinary strict error."""
    model = pc.wrap(nn.Linear(4, 4), "float8_from_float32")
    state = model.state_dict()
    del state["input_amax_history"]
    with pytest.raises(RuntimeError, match="input_amax_history"):
        model.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_dtype_moves_leave_codes_and_scales(mode: str, dtype: torch.dtype) -> None:
    """`.half()` and `.to(dtype)` change float parameters, never codes, scales or histories."""
    model = pc.wrap(nn.Linear(8, 4), f"{mode}_from_float32")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.float(), before[name].float())
    assert model(inputs(2, 8)).dtype == torch.float32


def test_to_meta_and_back() -> None:
    """Moving a wrapped layer to another device moves codes and scales with it."""
    model = pc.wrap(nn.Linear(8, 4), "int8_from_float32").to("meta")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    # The report names what would run there, and not what ran where the layer was wrapped.
    assert pc.report(model).rows[0].kernel == "linear_s8_torch"
    assert model.to_empty(device="cpu").weight_codes.dtype == torch.int8


@pytest.mark.parametrize("mode", MODES)
def test_state_dicts_hold_plain_codes(mode: str) -> None:
    """A state_dict has the codes under one name and in one form, however the layer keeps them."""
    model = pc.freeze(pc.wrap(nn.Linear(33, 17), f"{mode}_from_float32"))
    state = model.state_dict()
    assert state["weight_codes"].shape == (17, 33)
    assert state["weight_codes"].element_size() == 1
    assert "weight_packed" not in state
    other = pc.freeze(pc.wrap(nn.Linear(33, 17), f"{mode}_from_float32"))
    other.load_state_dict(state)
    x = inputs(3, 33)
    assert torch.equal(other(x), model(x))
    del state["weight_codes"]
    with pytest.raises(RuntimeError, match="weight_codes"):
        other.load_state_dict(state)
    state["weight_codes"] = torch.zeros(17, 34, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="size mismatch for weight_codes"):
        other.load_state_dict(state)


def test_codes_are_kept_once() -> None:
    """Beside its scales and bias a wrapped layer holds one byte for each weight, and padding."""
    model = pc.wrap(nn.Linear(256, 256), "int8_from_float32")
    model(inputs(3, 256))
    held = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
    # Scales, bias, and the sums of rows that the kernels keep: four bytes each.
    assert held <= 256 * 256 + 3 * 256 * 4 + 128
    assert pc.report(model).bytes_after == held


class Everything(nn.Module):
    """One layer of each kind that can be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.other = conv1d_of_hugging_face()(16, 16)
        self.lstm = nn.LSTM(16, 8, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.again = nn.Linear(8, 11)
        self.again.weight = self.head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.table(ids).transpose(1, 2))
        x = self.norm(x).transpose(1, 2).contiguous()
        x = x + self.attention(x, x, x)[0]
        x, _ = self.lstm(self.other(x))
        return self.head(x) + self.again(x)


@pytest.mark.parametrize("frozen", [False, True], ids=["as-wrapped", "frozen"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", *(f"{m}_from_mixed_bfloat16" for m in MODES)])
def test_files_of_every_layer_kind(policy: str, frozen: bool, tmp_path: Path) -> None:
    """What is saved of any layer kind loads into a fresh float model with the same bits and ties."""
    model = pc.wrap(seeded(Everything), policy)
    ids = torch.arange(10).reshape(2, 5)
    model(ids).float().square().mean().backward()
    model = pc.freeze(model) if frozen else model
    pc.save(model, tmp_path / "m.safetensors")
    loaded = pc.load(Everything(), tmp_path / "m.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids), model.eval()(ids))
        assert torch.equal(copy.deepcopy(model)(ids), model(ids))
        again = pickle.loads(pickle.dumps(model.conv))
        assert torch.equal(again(torch.ones(1, 16, 4)), model.conv(torch.ones(1, 16, 4)))
    assert pc.report(loaded).bytes_after == pc.report(model).bytes_after
    plain = pc.unwrap(loaded)
    assert plain.again.weight is plain.head.weight
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in Everything().named_parameters()
    }
    pc.load(pc.wrap(Everything(), policy), tmp_path / "m.safetensors")


def test_a_float_file_loads_into_plain_and_wrapped_models(tmp_path: Path) -> None:
    """A file of a model that was never wrapped loads into a plain one and into a quantized one."""
    source = seeded(Everything)
    pc.save(source, tmp_path / "m.safetensors")
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        plain = pc.load(Everything(), tmp_path / "m.safetensors")
        assert torch.equal(plain.eval()(ids), source.eval()(ids))
        small = pc.load(pc.wrap(Everything(), "int8_from_float32"), tmp_path / "m.safetensors")
        assert torch.equal(small.eval()(ids), pc.wrap(source, "int8_from_float32")(ids))


def test_tied_float8_head_trains() -> None:
    """A head that shares a float embedding's weight trains it in float8; frozen, it has codes."""
    model = pc.wrap(seeded(Tied), "float8_from_float32")
    assert quantized(model) == {"embedding": False, "head": True}
    model(torch.arange(4)).square().sum().backward()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.grad is not None
    wanted = model.eval()(torch.arange(4))
    assert torch.equal(pc.freeze(model)(torch.arange(4)), wanted)
    assert [n for n, _ in model.named_parameters()] == ["embedding.weight"]


def test_unwrapped_weights_are_trained_as_before() -> None:
    """A weight that was not to be trained is not after unwrapping either."""
    for trained in (True, False):
        layer = nn.Linear(4, 4).requires_grad_(trained)
        pc.unwrap(pc.wrap(layer, "int8_from_float32"))
        assert [p.requires_grad for p in layer.parameters()] == [trained, trained]


# Refusals.


def lazy() -> nn.Module:
    return nn.LazyLinear(4)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(8, 4), "weight", 0.5)


def parametrized() -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(8, 4))


def meta() -> nn.Module:
    return nn.Linear(8, 4, device="meta")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "int8_from_float32"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lazy, "no shapes yet"),
        (pruned, "prune.remove"),
        (parametrized, "remove_parametrizations"),
        (meta, "meta device"),
    ],
    ids=["lazy", "pruned", "parametrized", "meta"],
)
def test_what_cannot_be_wrapped_is_refused(make: Any, said: str, policy: str) -> None:
    """Layers whose weights are not there, or made anew at each call, are refused; nothing changes."""
    model = nn.Sequential(nn.Linear(8, 8), make())
    kinds = [type(layer) for layer in model]
    with pytest.raises(ValueError, match=said):
        pc.wrap(model, policy)
    assert [type(layer) for layer in model] == kinds


def test_attribute_that_the_policy_needs_is_refused() -> None:
    """A layer that has an attribute of a state tensor's name is refused."""
    layer = Named(4, 4)
    layer.input_scale = 3  # type: ignore[assignment]
    with pytest.raises(ValueError, match="'input_scale', which the policy needs"):
        pc.wrap(layer, "float8_from_float32")


def test_a_weight_that_does_not_fit_is_refused() -> None:
    """A weight of 1e5 is refused under float16."""
    layer = nn.Linear(4, 4)
    layer.weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match="which float16 cannot hold"):
        pc.wrap(layer, "float16")
    assert layer.weight.dtype == torch.float32


# Arrays.


def test_numpy_arrays_become_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any dtype, layout and byte order become tensors of the chosen backend."""
    monkeypatch.setenv("POLICY_BACKEND", "torch")
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    nest = {
        "f": np.arange(3.0)[::-1],
        "big": np.arange(3, dtype=">f4"),
        "frozen": frozen,
        "e4m3": np.ones(2, ml_dtypes.float8_e4m3fn),
        "bf16": np.ones((), ml_dtypes.bfloat16),
        "ids": np.arange(3),
        "text": "x",
    }
    out = pc.convert_input(nest, "mixed_bfloat16")
    assert out["f"].tolist() == [2, 1, 0]
    assert out["e4m3"].dtype == torch.float8_e4m3fn
    assert {out[n].dtype for n in ("f", "big", "frozen", "bf16")} == {torch.bfloat16}
    assert out["ids"].dtype == torch.int64
    with pytest.raises(ValueError, match="torch has no dtype"):
        pc.convert_input(np.array(["a"]), "float32")


def test_nests_of_tensors_are_cast() -> None:
    """Model outputs, named tuples and dataclasses keep their classes; each float leaf is cast."""

    class ModelOutput(OrderedDict):  # type: ignore[type-arg]  # as Hugging Face has it
        def __getattr__(self, name: str) -> Any:
            return self[name]

    class Pair(NamedTuple):
        x: torch.Tensor
        n: int

    @dataclasses.dataclass
    class Batch:
        pair: Pair
        ids: torch.Tensor
        text: str = "a"

    ids = torch.arange(3)
    nest = ModelOutput(logits=torch.ones(2), batch=Batch(Pair(torch.ones(2), 1), ids), none=None)
    out = pc.convert_input(nest, "mixed_bfloat16")
    assert type(out) is ModelOutput
    assert out.logits.dtype == out.batch.pair.x.dtype == torch.bfloat16
    assert out.batch.ids is ids
    assert nest.logits.dtype == torch.float32


def test_fork_after_use() -> None:
    """A child of a fork, such as a DataLoader's worker, computes too, and does not hang."""
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    layer = pc.wrap(nn.Linear(256, 256), "int8_from_float32")
    x = inputs(64, 256)
    with torch.no_grad():
        wanted = layer(x)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if torch.equal(layer(x), wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_casts_to_float8_saturate() -> None:
    """A cast to float8_e4m3fn gives the largest code where torch's own gives NaN."""
    y = pc.backend("torch").convert_input(torch.tensor([1000.0, -464, 465, 448]), "float8_e4m3fn")
    assert y.float().tolist() == [448, -448, 448, 448]
    with pytest.raises(ValueError, match="Cannot cast to"):
        pc.backend("torch").convert_input(torch.ones(1), "float8_e5m2fnuz")


def test_integer_policy_casts_nothing() -> None:
    """A layer with an integer policy inside a mixed model runs as it is."""
    model = pc.wrap(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), {"0": "int32", "1": "mixed_bfloat16"}
    )
    assert model[0](inputs(2, 8)).dtype == torch.float32
    assert model(inputs(2, 8)).dtype == torch.bfloat16


def test_repr_names_policies() -> None:
    """`print(model)` says which policy each layer has."""
    model = pc.wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "int8_from_float32")
    text = repr(model)
    assert "(0): Linear(in_features=8, out_features=8, bias=True" in text
    assert '<QuantizedDTypePolicy "int8_from_float32">' in text
