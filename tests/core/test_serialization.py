"""Configs: the whole text of each kind, round trips, older forms, and composites."""

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policy_core as pc
from policy_core import testing

GOLDEN = pathlib.Path(__file__).parent / "golden"

KINDS = {
    "float": pc.DTypePolicy("mixed_bfloat16"),
    "float_alias": pc.FloatDTypePolicy("float32"),
    "quantized": pc.QuantizedDTypePolicy("int8", "mixed_bfloat16"),
    "quantized_weight_only": pc.QuantizedDTypePolicy("int8/weight_only", "float16"),
    "float8": pc.QuantizedFloat8DTypePolicy("float8", "float32", amax_history_length=123),
    "int4": pc.Int4DTypePolicy("int4/128", "float32"),
    "gptq": pc.GPTQDTypePolicy("gptq/4/128", "float32"),
    "awq": pc.AWQDTypePolicy("awq/4/-1", "bfloat16"),
    "ternary": pc.TernaryDTypePolicy("ternary", "float32"),
    "map": pc.DTypePolicyMap("mixed_bfloat16", {"encoder/.*": "int8_from_mixed_bfloat16"}),
    "map_without_default": pc.DTypePolicyMap(
        None, {"a": "float16", "b": pc.QuantizedFloat8DTypePolicy("float8", "bfloat16", 7)}
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_golden_config(name):
    """The config of each kind of policy is, as text, the one that was written down."""
    text = json.dumps(pc.serialize(KINDS[name]), indent=2) + "\n"
    assert text == (GOLDEN / f"{name}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "map_without_default"])
def test_golden_config_is_read(name):
    """The config that was written down gives the policy, of its class."""
    policy = pc.deserialize(json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8")))
    assert policy == KINDS[name]
    assert type(policy) is type(KINDS[name])


def test_every_golden_file_is_tested():
    """There is one golden file for each kind, and no other."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(KINDS)


@given(testing.policies() | testing.policy_maps())
def test_configs_round_trip(policy):
    """A policy or map goes through JSON text and is equal, by either door."""
    config = json.loads(json.dumps(pc.serialize(policy)))
    before = json.dumps(config)
    assert pc.deserialize(config) == pc.get(config) == policy
    assert json.dumps(config) == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(json_values)
def test_plain_values_are_their_own_config(value):
    """JSON values are serialized as they are."""
    assert pc.serialize(value) == value


def test_numpy_scalars_become_numbers():
    """numpy's scalars in a config become Python's numbers, and tuples become lists."""
    assert json.dumps(pc.serialize((np.int64(3), np.float32(0.5), np.True_))) == "[3, 0.5, true]"


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        pytest.param(
            {"class_name": "Policy", "config": {"name": "mixed_float16"}},
            pc.DTypePolicy("mixed_float16"),
            id="tf-keras",
        ),
        pytest.param(
            {
                "module": "keras.mixed_precision",
                "class_name": "Policy",
                "config": {"name": "mixed_float16"},
                "registered_name": None,
            },
            pc.DTypePolicy("mixed_float16"),
            id="tf-keras-with-module",
        ),
        pytest.param(
            {"class_name": "PolicyV1", "config": {"name": "float32"}},
            pc.DTypePolicy("float32"),
            id="policy-v1",
        ),
        pytest.param(
            {
                "module": "keras",
                "class_name": "FloatDTypePolicy",
                "config": {"name": "bfloat16"},
                "registered_name": "FloatDTypePolicy",
                "shared_object_id": 7,
            },
            pc.FloatDTypePolicy("bfloat16"),
            id="keras-3.1-float",
        ),
        pytest.param(
            {"class_name": "QuantizedDTypePolicy", "config": {"name": "int8_from_float32"}},
            pc.get("int8_from_float32"),
            id="keras-3.3-int8",
        ),
        pytest.param(
            {
                "class_name": "QuantizedFloat8DTypePolicy",
                "config": {"name": "float8_from_mixed_float16", "amax_history_length": 9},
            },
            pc.QuantizedFloat8DTypePolicy("float8", "mixed_float16", 9),
            id="keras-3.3-float8",
        ),
        pytest.param(
            {
                "class_name": "Int4DTypePolicy",
                "config": {"mode": "int4/None", "source_name": "float32"},
            },
            pc.get("int4/-1_from_float32"),
            id="int4-none",
        ),
        pytest.param("int4/None_from_float32", pc.get("int4/-1_from_float32"), id="plain-text"),
        pytest.param(
            {
                "class_name": "DTypePolicyMap",
                "config": {"default_policy": "float16", "policy_map": {"a": "bfloat16"}},
            },
            pc.DTypePolicyMap("float16", {"a": "bfloat16"}),
            id="map-of-names",
        ),
        pytest.param(
            {"class_name": "DTypePolicyMap", "config": {"policy_map": None}},
            pc.DTypePolicyMap(),
            id="map-of-nothing",
        ),
    ],
)
def test_older_forms(config, policy):
    """Configs of older versions give the policy that they meant."""
    assert pc.deserialize(config) == pc.get(config) == policy


def test_lists_and_none():
    """A list of configs gives a list of objects; None gives None."""
    configs = [pc.serialize(policy) for policy in KINDS.values()]
    assert pc.deserialize(configs[:-1]) == list(KINDS.values())[:-1]
    assert pc.deserialize(None) is None


def test_a_map_without_default_follows_the_new_default():
    """Serializing changes no policy; after a reload all sources are those of the new default."""
    pc.set_dtype_policy("mixed_bfloat16")
    rules = {"a": pc.get("mixed_bfloat16"), "b": pc.get("int8_from_float32"), "c": KINDS["float8"]}
    policies = pc.DTypePolicyMap(None, rules)
    text = json.dumps(pc.serialize(policies))
    assert dict(policies.items()) == rules
    assert json.dumps(pc.serialize(policies)) == text

    pc.set_dtype_policy("bfloat16")
    again = pc.deserialize(json.loads(text))
    assert [again[key].name for key in ("a", "b", "c", "elsewhere")] == [
        "bfloat16",
        "int8_from_bfloat16",
        "float8_from_bfloat16",
        "bfloat16",
    ]
    assert again["c"].amax_history_length == 123
    assert dict(policies.items()) == rules


class Composite:
    """A layer of layers, each with a path and a policy, as the documentation shows it."""

    def __init__(self, policies=None):
        self.policies = pc.DTypePolicyMap() if policies is None else pc.get(policies)
        paths = ("block/norm", "block/query", "block/out")
        self.layers = {path: self.policies[path] for path in paths}

    def get_config(self):
        quantized = pc.DTypePolicyMap()
        for path, policy in self.layers.items():
            if policy.quantization_mode is not None:
                quantized[path] = policy
        return {"policies": pc.serialize(quantized)} if quantized else {}

    @classmethod
    def from_config(cls, config):
        return cls(config.pop("policies", None))


@pytest.fixture
def composite(registry):
    return pc.register_serializable("documentation")(Composite)


def test_a_composite_layer_round_trips(composite):
    """A registered composite collects its quantized layers' policies by path and gets them back."""
    layer = composite({"class_name": "DTypePolicyMap", "config": {
        "policy_map": {"block/[qo].*": "int8_from_float32"}}})  # fmt: skip
    config = pc.serialize(layer)
    assert (config["registered_name"], config["class_name"]) == (
        "documentation>Composite",
        "Composite",
    )
    assert list(config["config"]["policies"]["config"]["policy_map"]) == [
        "block/query",
        "block/out",
    ]
    again = pc.deserialize(json.loads(json.dumps(config)))
    assert again.layers == layer.layers
    assert [policy.name for policy in again.layers.values()] == [
        "float32",
        "int8_from_float32",
        "int8_from_float32",
    ]


def test_deserialize_leaves_the_config_alone(composite):
    """A from_config that takes its dict apart does not reach the caller's config."""
    config = pc.serialize(composite(pc.DTypePolicyMap(None, {"block/out": "int8_from_float32"})))
    before = json.dumps(config)
    assert pc.deserialize(config).layers == pc.deserialize(config).layers
    assert json.dumps(config) == before


def test_a_users_policy_in_a_map(registry):
    """A registered policy class is kept in a map, with or without a default, and by `get`."""

    @pc.register_serializable("mine")
    class Wide(pc.DTypePolicy):
        def __init__(self):
            super().__init__("float64")

        def get_config(self):
            return {}

    for default in (None, "float32"):
        policies = pc.DTypePolicyMap(default, {"a": Wide()})
        again = pc.deserialize(json.loads(json.dumps(pc.serialize(policies))))
        assert type(again["a"]) is Wide
    assert pc.get(pc.serialize(Wide())) == Wide()
