"""state_dict, files and moves of wrapped torch models."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import policy_core as pc

from .torch_models import (
    FORMS,
    MODES,
    Tied,
    conv1d_of_hugging_face,
    encoder,
    inputs,
    quantized,
    seeded,
)


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


def test_own_tensors_named_like_state_are_ordinary(tmp_path: Path) -> None:
    """A model's own parameters and buffers named like scales are cast, saved and kept like others."""

    class Named(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(value))
            self.register_buffer("x_scale", torch.tensor(value))
            self.proj = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x) * self.logit_scale * self.x_scale

    model = pc.wrap(Named(-2.5), "int8_from_mixed_bfloat16")
    assert (model.logit_scale.item(), model.x_scale.item()) == (-2.5, -2.5)
    pc.save(model, tmp_path / "m.safetensors")
    loaded = pc.load(Named(1.0), tmp_path / "m.safetensors")
    assert (loaded.logit_scale.item(), loaded.x_scale.item()) == (-2.5, -2.5)
    assert loaded.half().x_scale.dtype == torch.float16
    plain = pc.unwrap(loaded)
    assert (plain.logit_scale.item(), plain.x_scale.item()) == (-2.5, -2.5)
    assert isinstance(plain.logit_scale, nn.Parameter)


def test_to_meta_and_back() -> None:
    """Moving a wrapped layer to another device moves codes and scales with it."""
    model = pc.wrap(nn.Linear(8, 4), "int8_from_float32").to("meta")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    # The report names what would run there, and not what ran where the layer was wrapped.
    assert pc.report(model).rows[0].kernel == "linear_s8_torch"
    assert model.to_empty(device="cpu").weight_codes.dtype == torch.int8


def test_delayed_scaling_state_moves_with_its_layer() -> None:
    """Scales and amax histories are buffers: they have names, and `.to(device)` moves them."""
    model = pc.wrap(nn.Linear(8, 4), "float8_from_float32")
    roles = ("input", "weight", "output_grad")
    names = {f"{role}_{part}" for role in roles for part in ("scale", "amax_history")}
    assert dict(model.named_buffers()).keys() == names
    assert {buffer.device.type for buffer in model.to("meta").buffers()} == {"meta"}


def test_one_quantized_child_of_many(tmp_path: Path) -> None:
    """A model with one quantized layer deep inside comes back from its file as it was."""
    rules = {"layers/1/linear1": "int8_from_float32"}
    model = pc.wrap(seeded(encoder), rules).eval()
    pc.save(model, tmp_path / "m.safetensors")
    loaded = pc.load(encoder(), tmp_path / "m.safetensors").eval()
    wanted = {row.path: row.policy for row in pc.report(model).rows}
    assert {row.path: row.policy for row in pc.report(loaded).rows} == wanted
    assert [path for path, is_so in quantized(loaded).items() if is_so] == ["layers/1/linear1"]
    x = inputs(2, 5, 16)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_mixed_state_loads_into_a_float_model() -> None:
    """What was trained in mixed precision is a float32 state_dict, which a plain model loads."""

    def plain() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 2), nn.LayerNorm(2))

    state = pc.wrap(plain(), "mixed_bfloat16").state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    plain().load_state_dict(state)


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
    # Scales, bias, and the sums of rows that the kernels keep: four bytes each; and for each 32
    # channels what says which they are.
    assert held <= 256 * 256 + 3 * 256 * 4 + 256 // 32 * 64 + 64
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


def test_unwrapping_rounds_once() -> None:
    """A float32 weight under bfloat16 variables comes back as codes times scale, in float32."""
    layer = pc.wrap(nn.Linear(64, 8), "int8_from_bfloat16")
    wanted = layer.weight_codes.float() * layer.weight_scale
    assert torch.equal(pc.unwrap(layer).weight, wanted)
    assert not [name for name in vars(layer) if name.startswith("_policy")]


def test_unwrapped_weights_are_trained_as_before() -> None:
    """A weight that was not to be trained is not after unwrapping either."""
    for trained in (True, False):
        layer = nn.Linear(4, 4).requires_grad_(trained)
        pc.unwrap(pc.wrap(layer, "int8_from_float32"))
        assert [p.requires_grad for p in layer.parameters()] == [trained, trained]


@pytest.mark.parametrize("mode", ["int8", "float8/weight_only"])
def test_bad_values_in_a_float_checkpoint_are_refused(mode: str) -> None:
    """A NaN in a checkpoint's weight, which has no code, is an error, and the codes stay."""
    layer = pc.wrap(nn.Linear(8, 4), f"{mode}_from_float32")
    before = layer.weight
    bad = nn.Linear(8, 4).state_dict()
    bad["weight"][0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="weight in the checkpoint holds a NaN"):
        layer.load_state_dict(bad)
    assert torch.equal(layer.weight, before)


def test_codes_are_not_reset_silently() -> None:
    """`reset_parameters` of a layer that keeps only codes raises, and changes nothing."""
    layer = pc.wrap(nn.Linear(8, 4), "int8_from_float32")
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="keeps only codes"):
        layer.reset_parameters()
    assert all(torch.equal(layer.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("policy", ["int8_from_float32", "float8/dynamic_from_float32"])
def test_defaults_of_torch_do_not_reach_a_model_on_the_cpu(policy: str) -> None:
    """Another default device or dtype changes nothing for a model that is on the CPU."""
    x = torch.ones(2, 8)
    one = nn.Linear(8, 4)
    other = copy.deepcopy(one)
    wanted = pc.wrap(one, policy)(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            y = pc.wrap(other, policy)(x)
            restored = pc.unwrap(copy.deepcopy(other))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, wanted)
    assert restored.weight.device.type == "cpu"
