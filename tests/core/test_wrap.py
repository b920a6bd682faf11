"""wrap, unwrap and freeze: what the contract suite does not show on every backend."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import policy_core as pc
import policy_numpy as pn
from policy_core.errors import LayerError, UnmatchedRuleError


def model(width: int = 8) -> pn.Sequential:
    return pn.Sequential(
        [
            pn.Embedding(10, width, seed=0),
            pn.Sequential([pn.Dense(width, width, seed=1), pn.LayerNorm(width)]),
            pn.Dense(width, 4, seed=2),
        ]
    )


class Encoder(pn.Layer):
    """A composite with named parts, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [pn.Dense(8, 8, seed=0), pn.Dense(8, 8, seed=1)]
        self.head = {"out": pn.Dense(8, 2, seed=2)}

    def __call__(self, x, training=False):
        for layer in self.layers:
            x = layer(x, training)
        return self.head["out"](x, training)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"encoder/layrs/.*": "float32"}, ("Rule 'encoder/layrs/.*' matches no layer. Did you mean "
         "'encoder/layers'?")),
        ({"encoder": "float32"}, ("it is the path of a container. For the layers inside write "
         "'encoder/.*'.")),
        ({"encoder/layers/7": "float32"}, "Did you mean 'encoder/layers/"),
        ({"zzz": "float32"}, ("Layers: 'encoder/layers/0', 'encoder/layers/1', "
         "'encoder/head/out'.")),
    ],
    ids=["typo", "container", "index", "nothing-near"],
)  # fmt: skip
def test_unmatched_rule_names_what_is_near(rules: dict[str, str], said: str) -> None:
    """The error about a rule without layers says which path was probably meant."""

    class Model(pn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

    with pytest.raises(UnmatchedRuleError) as raised:
        pc.wrap(Model(), rules)
    assert said in str(raised.value)


def test_attention_stays_float_beside_a_negative_pattern() -> None:
    """A rule with a negative look-ahead leaves the layers that it excludes to the other rule."""

    class Block(pn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attn_q, self.mlp = pn.Dense(4, 4), pn.Dense(4, 4)

    rules = {".*attn.*": "float32", "(?!.*attn).*": "int8_from_float32"}
    rows = pc.report(pc.wrap(Block(), rules)).rows
    assert {row.path: row.policy for row in rows} == {
        "attn_q": "float32",
        "mlp": "int8_from_float32",
    }


@pytest.mark.parametrize(
    "argument",
    [{"on_unmatched": "Error"}, {"on_wrapped": "skip"}, {"on_wrapped": None}],
    ids=str,
)
def test_unknown_options_are_refused(argument: dict[str, object]) -> None:
    """An option's message lists its values."""
    with pytest.raises(ValueError, match="must be one of"):
        pc.wrap(model(), "float32", **argument)


@pytest.mark.parametrize(
    "bad", [None, 3, "model", [1], (), ("model", {}), np.ones(3), object()], ids=repr
)
def test_what_is_no_model_is_refused(bad: object) -> None:
    """The error says which frameworks there are, and what came."""
    for function in (pc.wrap, pc.unwrap, pc.freeze, pc.report):
        with pytest.raises(TypeError, match="Expected a model of an installed framework"):
            function(bad)


def test_empty_model_is_refused() -> None:
    """A model without layers is an error, for wrap and report alike."""
    for function in (pc.wrap, pc.unwrap, pc.freeze, pc.report):
        with pytest.raises(ValueError, match="has no layers"):
            function(pn.Sequential())


def test_one_layer_is_a_model() -> None:
    """A layer by itself can be wrapped; its path is empty."""
    layer = pn.Dense(8, 4, seed=0)
    assert pc.wrap(layer, "int8_from_float32") is layer
    assert pc.report(layer).rows[0].path == ""
    assert "(model)" in str(pc.report(layer))


def test_layers_can_be_wrapped_before_their_model() -> None:
    """A head that has its own policy is kept where the rest gets another."""
    whole = model()
    pc.wrap(whole.layers[2], "float32")
    with pytest.raises(ValueError, match="'2' has float32"):
        pc.wrap(whole, "int8_from_float32")
    pc.wrap(whole, "int8_from_float32", on_wrapped="keep")
    assert [row.policy for row in pc.report(whole).rows] == [
        "int8_from_float32",
        "int8_from_float32",
        "float32",
        "float32",
    ]


def test_default_policy_is_the_processes() -> None:
    """Without a policy the default policy applies, and a scope stands in front of it."""
    with pc.policy_scope("int8_from_mixed_bfloat16"):
        wrapped = pc.wrap(model())
    assert pc.report(wrapped).rows[0].policy == "int8_from_mixed_bfloat16"


def test_quantized_default_policy_leaves_norms_float() -> None:
    """Under a float8 default policy norms follow the source, and say what they do."""
    pc.set_dtype_policy("float8_from_mixed_bfloat16")
    wrapped = pc.wrap(model())
    norm = wrapped.layers[1].layers[1]
    assert norm.dtype_policy == pc.get("mixed_bfloat16")
    assert norm(np.ones((2, 8), np.float32)).dtype.name == "bfloat16"
    assert wrapped.layers[2].dtype_policy == pc.get("float8_from_mixed_bfloat16")


def test_tied_weight_stays_tied() -> None:
    """A weight that two layers share is quantized once and stays one array."""
    table, head = pn.Embedding(10, 8, seed=0), pn.Dense(8, 10, bias=False)
    head.tensors["weight"] = table.tensors["weight"]
    tied = pc.wrap(pn.Sequential([table, head]), "int8_from_float32")
    assert table.tensors["weight"] is head.tensors["weight"]
    assert table.tensors["weight_scale"] is head.tensors["weight_scale"]
    found = pc.report(tied)
    alone = pc.report(pc.wrap(pn.Dense(8, 10, bias=False), "int8_from_float32"))
    assert (found.bytes_before, found.bytes_after) == (10 * 8 * 4, alone.bytes_after)
    assert np.array_equal(table(np.arange(10)), table.weight)
    pc.unwrap(tied)
    assert table.tensors["weight"] is head.tensors["weight"]


@pytest.mark.parametrize("rules", [{"1": "int8_from_float32"}, {"0": "int8_from_float32"}])
def test_tied_weight_needs_one_form(rules: dict[str, str]) -> None:
    """A policy for only one of two layers that share a weight is refused, and changes nothing."""
    table, head = pn.Embedding(10, 8, seed=0), pn.Dense(8, 10, bias=False)
    head.tensors["weight"] = table.tensors["weight"]
    tied = pn.Sequential([table, head])
    with pytest.raises(LayerError, match="share one weight") as raised:
        pc.wrap(tied, rules)
    assert "'0' and '1'" in str(raised.value)
    assert table.dtype_policy is head.dtype_policy is None


def test_subclass_is_taken_unless_it_computes_otherwise() -> None:
    """A subclass that only inherits is quantized; one that overrides compute is left out."""

    class Named(pn.Dense):
        pass

    class Doubled(pn.Dense):
        def compute(self, x, tensors):
            return 2 * super().compute(x, tensors)

    mixed = pc.wrap(pn.Sequential([Named(4, 4), Doubled(4, 4, seed=0)]), "int8_from_float32")
    named, doubled = pc.report(mixed).rows
    assert named.policy == "int8_from_float32"
    assert doubled.policy == "float32"
    assert "overrides compute" in doubled.note


def test_narrowing_that_overflows_is_refused() -> None:
    """A weight that the variable dtype cannot hold is refused, not turned into infinity."""
    layer = pn.Dense(4, 4)
    layer.tensors["weight"][0, 0] = 1e5
    with pytest.raises(ValueError, match="which float16 cannot hold"):
        pc.wrap(layer, "float16")
    pc.wrap(layer, "mixed_float16")


def test_float_weights_are_freed_layer_by_layer() -> None:
    """Wrapping 20 layers never holds more than it started with and one layer, and frees all."""
    size = 256
    layer_bytes = size * size * 4
    pc.wrap(pn.Dense(size, size, bias=False), "int8_from_float32")  # imports and caches
    tracemalloc.start()
    try:
        deep = pn.Sequential([pn.Dense(size, size, bias=False, seed=i) for i in range(20)])
        alive = [weakref.ref(layer.tensors["weight"]) for layer in deep.layers]
        gc.collect()
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        pc.wrap(deep, "int8_from_float32")
        end, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert start >= 20 * layer_bytes
    assert peak <= start + layer_bytes
    assert end <= 0.3 * start
    assert all(weight() is None for weight in alive)
    assert pc.report(deep).bytes_after <= 0.3 * pc.report(deep).bytes_before


def test_freeze_refuses_a_weight_without_codes() -> None:
    """A weight that became NaN in training is named when it is frozen, and nothing changes."""
    trained = pc.wrap(model(), "float8_from_float32")
    trained.layers[2].tensors["weight"][0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN or an infinity") as raised:
        pc.freeze(trained)
    assert "'2'" in raised.value.__notes__[0]
    assert all(row.kernel == "numpy" or "trainable" in row.note for row in pc.report(trained).rows)


def test_composite_is_described_by_the_policies_of_its_parts() -> None:
    """The example of the documentation: a composite round-trips through JSON with its map."""
    import json

    @pc.register_serializable("test_wrap")
    class Block(pn.Sequential):
        def __init__(self, width: int, dtype=None) -> None:
            super().__init__([pn.Dense(width, 2 * width), pn.LayerNorm(2 * width)])
            self.width = width
            if dtype is not None:
                pc.wrap(self, dtype)

        def get_config(self):
            policies = pc.DTypePolicyMap("float32")
            for path, layer in self.flatten():
                policy = layer.dtype_policy
                if policy is not None and policy.quantization_mode is not None:
                    policies[path] = policy
            return {"width": self.width, "dtype": policies if policies else None}

        @classmethod
        def from_config(cls, config):
            dtype = None if config["dtype"] is None else pc.get(config["dtype"])
            return cls(config["width"], dtype)

    block = Block(4, {"0": "int8_from_float32"})
    again = pc.deserialize(json.loads(json.dumps(pc.serialize(block))))
    assert isinstance(again, Block)
    assert again.layers[0].dtype_policy == pc.get("int8_from_float32")
    assert again.layers[1].dtype_policy == pc.get("float32")
    assert pc.serialize(again) == pc.serialize(block)


def test_tied_weight_that_both_layers_train_may_stay() -> None:
    """A float table and a float8 head that trains keep one float weight, and share it."""
    table, head = pn.Embedding(10, 8, seed=0), pn.Dense(8, 10, bias=False)
    head.tensors["weight"] = table.tensors["weight"]
    tied = pc.wrap(pn.Sequential([table, head]), "float8_from_mixed_bfloat16")
    assert [row.quantized for row in pc.report(tied).rows] == [False, True]
    assert table.tensors["weight"] is head.tensors["weight"]


@pytest.fixture
def aliased(monkeypatch: pytest.MonkeyPatch) -> pn.Sequential:
    """A model whose second layer has another name, and whose backend reads rules of its own."""
    backend = pc.backend("numpy")
    walk = backend.walk

    def walk_aliased(network: object) -> list[object]:
        sites = walk(network)
        sites[1].aliases = ("net/second",)
        return sites

    monkeypatch.setattr(type(backend), "walk", lambda self, network: walk_aliased(network))
    return pn.Sequential([pn.Dense(4, 4, seed=0), pn.Dense(4, 4, seed=1)])


def test_rules_may_use_an_alias_letter_for_letter(aliased: pn.Sequential) -> None:
    """A rule that is an alias means its layer; a pattern never matches one; the path comes first."""
    pc.wrap(aliased, {"net/second": "int8_from_float32"})
    assert [row.asked for row in pc.report(aliased).rows] == ["float32", "int8_from_float32"]
    pc.unwrap(aliased)
    with pytest.raises(UnmatchedRuleError):
        pc.wrap(aliased, {"net/.*": "int8_from_float32"})
    pc.wrap(aliased, {"net/second": "bfloat16", "1": "int8_from_float32"})
    assert pc.report(aliased).rows[1].asked == "int8_from_float32"


def test_backend_may_read_rules_of_its_framework(
    aliased: pn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend with `rules_of` gives what a policy of its framework's own means for its sites."""
    backend = pc.backend("numpy")
    rules = {"0": "int8_from_float32"}
    monkeypatch.setattr(type(backend), "rules_of", lambda self, policy, sites: rules, raising=False)
    pc.wrap(aliased, object())
    assert [row.asked for row in pc.report(aliased).rows] == ["int8_from_float32", "float32"]
