"""torch layers of all kinds: what is quantized, what is left out and why."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import policy_core as pc
from policy_torch import LayerAdapter

from .torch_models import (
    FORMS,
    MODES,
    close,
    conv1d_of_hugging_face,
    inputs,
    notes,
    quantized,
    seeded,
)


def test_class_that_is_registered_after_it_was_wrapped() -> None:
    """A class counts as it is registered now, also if layers of it were wrapped before."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == self.wanted
            return x

    for kind, wanted in (("other", torch.float16), ("norm", torch.float32)):
        layer = Scaled()
        layer.wanted = wanted
        if kind == "norm":
            pc.register_layer(Scaled, LayerAdapter(kind="norm"))
        assert pc.wrap(layer, "mixed_float16")(inputs(2, 8)).dtype == torch.float16


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


def test_parameter_lists_in_containers_are_the_readers_too(tmp_path: Any) -> None:
    """Lists of parameters in lists and dicts of modules are read, reported, saved and loaded."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList([nn.ParameterList([torch.rand(8, 8)]), nn.Linear(8, 8)])
            self.named = nn.ParameterDict({"a": nn.ParameterList([torch.rand(8, 4)])})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rows[1](x @ self.rows[0][0]) @ self.named["a"][0]

    model = pc.wrap(Nested(), "mixed_bfloat16")
    assert model(inputs(3, 8)).dtype == torch.bfloat16
    rows = {row.path: row.bytes_after for row in pc.report(model).rows}
    assert rows == {"": (64 + 32) * 4, "rows/1": 72 * 4}
    pc.save(model, tmp_path / "model")
    loaded = pc.load(Nested(), tmp_path / "model")
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_bags_keep_their_table(sparse: bool) -> None:
    """A bag's table, which `max_norm` rescales in place, is itself read; sparse gradients arrive."""
    bag = nn.EmbeddingBag(10, 4, mode="sum", max_norm=None if sparse else 0.1, sparse=sparse)
    pc.wrap(bag, "mixed_bfloat16")
    y = bag(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))
    assert y.dtype == torch.bfloat16
    if sparse:
        y.sum().backward()
        assert bag.weight.grad.is_sparse
        assert bag.weight.grad.dtype == torch.float32
    else:
        assert bag.weight[1].norm() < 0.1001


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("policy", FORMS[2:])
def test_other_inputs_count_by_their_values(policy: str, dtype: torch.dtype) -> None:
    """A quantized layer takes integers and float8 values for numbers, and refuses complex ones."""
    layer = pc.wrap(nn.Linear(8, 4), policy).eval()
    x = torch.ones(2, 8).to(dtype)
    assert torch.equal(layer(x), layer(x.float()))
    with pytest.raises(TypeError, match="Expected real inputs"):
        layer(torch.ones(2, 8) * 1j)


@pytest.mark.parametrize("policy", FORMS)
def test_convolutions_take_bytes_and_keywords(policy: str) -> None:
    """A quantized convolution is called by keyword as the plain one, and reads bytes by values."""
    layer = pc.wrap(nn.Conv2d(4, 3, 3), policy).eval()
    x = inputs(2, 4, 5, 5)
    assert torch.equal(layer(input=x), layer(x))
    if policy in FORMS[2:]:
        pixels = torch.arange(200, dtype=torch.uint8).reshape(2, 4, 5, 5)
        assert torch.equal(layer(pixels), layer(pixels.float()))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_losses_compute_in_float32(policy: str) -> None:
    """A loss with class weights works within a model, and is rounded once."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    x, target = inputs(2, 3).half(), torch.tensor([0, 2])
    wanted = loss(x.float(), target)
    pc.wrap(loss, policy)
    y = loss(x.bfloat16() if policy == "mixed_bfloat16" else x, target)
    assert y.dtype == getattr(torch, policy.removeprefix("mixed_"))
    assert close(y, wanted, 0.01)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16], ids=str)
def test_large_inputs_and_biases_of_any_dtype(bias: torch.dtype | None, mode: str) -> None:
    """A bfloat16 input that holds 1e5 gives a finite result near the float one, for any bias."""
    layer = seeded(lambda: nn.Linear(64, 8, bias=bias is not None))
    x = inputs(4, 64).bfloat16()
    x[1, 3] = 1e5
    wanted = layer(x.float()).detach()
    pc.wrap(layer, f"{mode}_from_mixed_bfloat16")
    if bias is not None:
        layer.bias = nn.Parameter(layer.bias.to(bias))
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert close(y, wanted, 0.05)


@pytest.mark.parametrize("mode", ["int8", "float8/dynamic"])
@pytest.mark.parametrize("shape", [(1, 5, 2048), (2, 3, 4)], ids=str)
def test_rows_have_scales_of_their_own(shape: tuple[int, ...], mode: str) -> None:
    """Rows of amax 1 beside rows of amax 1000 are as exact as by themselves, over any leading axes."""
    layer = seeded(lambda: nn.Linear(shape[-1], 16, bias=False))
    x = inputs(*shape)
    x = x / x.abs().amax(-1, keepdim=True)
    x[0, ::2] *= 1000
    pc.wrap(layer, f"{mode}_from_float32")
    with torch.no_grad():
        y = layer(x)
        for i in range(shape[0]):
            for j in range(shape[1]):
                assert torch.equal(y[i, j], layer(x[i, j]))
        # What the input's codes lose; the weight's are the same on both sides.
        wanted = x @ layer.weight.t()
    bound = 0.01 if mode == "int8" else 2**-4
    norms = x.norm(dim=-1, keepdim=True) * layer.weight.norm(dim=-1)
    assert ((y - wanted).abs() <= bound * norms).all()


def test_default_policy_reaches_every_kind_of_layer() -> None:
    """Under a float8 default policy linear layers quantize, norms and dropout follow the source, and
    every layer does what it says.
    """
    with pc.policy_scope("float8_from_mixed_bfloat16"):
        layers = [nn.Embedding(9, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 4)]
        model = pc.wrap(nn.Sequential(*layers))
    assert quantized(model) == {"0": False, "1": False, "2": False, "3": True}
    says = {row.path: row.policy for row in pc.report(model).rows}
    assert says == {**dict.fromkeys("012", "mixed_bfloat16"), "3": "float8_from_mixed_bfloat16"}
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    model(torch.arange(9)).float().sum().backward()
    assert seen == [torch.bfloat16] * 4
    assert (model[3].input_amax_history > 0).sum() == 1


def test_embeddings_and_linear_layers_meet_in_one_dtype() -> None:
    """Rows of an embedding and a projection of floats can be added under a mixed policy."""
    model = pc.wrap(nn.ModuleList([nn.Embedding(5, 4), nn.Linear(3, 4)]), "mixed_bfloat16")
    ids, x = torch.arange(5), inputs(5, 3)
    assert {model[0](ids).dtype, model[1](x).dtype} == {torch.bfloat16}
