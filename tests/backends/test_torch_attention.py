"""torch's attention and its transformer layers under every policy."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import policy_core as pc

from .torch_models import FORMS, close, encoder, inputs, quantized, seeded


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


@pytest.mark.parametrize("policy", FORMS)
def test_encoder_and_decoder(policy: str) -> None:
    """A whole transformer, with attention across and masks of all kinds, follows every policy."""
    make = lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)  # noqa: E731
    plain, model = seeded(make), pc.wrap(seeded(make), policy)
    source, target = inputs(2, 7, 16), inputs(2, 5, 16, seed=2)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
        "src_key_padding_mask": torch.arange(7).expand(2, -1) > 4,
        "memory_key_padding_mask": torch.arange(7).expand(2, -1) > 4,
    }
    # torch warns of a boolean padding mask beside a float mask, and takes it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = plain(source, target, **masks).detach()
        y = model(source, target, **masks)
    assert close(y, wanted, 0.2)
    y.float().sum().backward()
    if "_from_" in policy:
        assert sum(quantized(model).values()) == 10


def test_causal_hint_needs_its_mask() -> None:
    """`is_causal` without a mask is an error, as it is in torch."""
    layer = pc.wrap(nn.MultiheadAttention(16, 2), "float32")
    x = inputs(3, 2, 16)
    with pytest.raises(RuntimeError, match="give the mask too"):
        layer(x, x, x, is_causal=True)
