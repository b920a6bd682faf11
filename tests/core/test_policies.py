"""The policy classes as values: what they say, and that they cannot change."""

import copy
import functools
import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policy_core as pc
from policy_core import testing
from policy_core._dtypes import DTYPES
from policy_core._modes import scheme_names

MIXED = ("mixed_float16", "mixed_bfloat16")
SOURCES = ("float16", "bfloat16", "float32", "float64", *MIXED)


@given(testing.policies())
def test_name_and_get_are_inverses(policy):
    """Each policy's name gives the policy back, but for the float8 history that no name holds."""
    again = pc.get(policy.name)
    assert again.name == policy.name
    if getattr(policy, "amax_history_length", 1024) == 1024:
        assert again == policy


@pytest.mark.parametrize("name", [*DTYPES, *MIXED])
def test_every_float_name_is_a_policy(name):
    """Every dtype's name and both mixed names are policies without a quantization mode."""
    policy = pc.DTypePolicy(name)
    assert policy == pc.FloatDTypePolicy(name) == pc.get(name)
    assert (policy.name, policy.quantization_mode, policy.quantization) == (name, None, None)
    assert policy.source_policy is policy


@pytest.mark.parametrize(
    ("name", "compute", "variable"),
    [
        pytest.param("mixed_float16", "float16", "float32", id="mixed_float16"),
        pytest.param("mixed_bfloat16", "bfloat16", "float32", id="mixed_bfloat16"),
        pytest.param("float32", "float32", "float32", id="float32"),
        pytest.param("uint8", "uint8", "uint8", id="uint8"),
        pytest.param("int8_from_mixed_bfloat16", "bfloat16", "float32", id="int8"),
        pytest.param("int8_from_bfloat16", "bfloat16", "bfloat16", id="int8-bfloat16"),
        pytest.param("float8_from_mixed_float16", "float16", "float32", id="float8"),
        pytest.param("int4/128_from_float16", "float16", "float16", id="int4"),
    ],
)
def test_dtypes(name, compute, variable):
    """Compute and variable dtype are those of the float name, or of the source."""
    policy = pc.get(name)
    assert (policy.compute_dtype, policy.variable_dtype) == (compute, variable)


@pytest.mark.parametrize(
    ("scheme", "source"),
    [
        (scheme, source)
        for scheme in scheme_names()
        for source in SOURCES
        # int8 refuses these two, as test_names.py shows.
        if not (scheme == "int8" and source in ("float16", "mixed_float16"))
    ],
)
def test_quantized_policies_say_their_parts(scheme, source):
    """A quantized policy of every scheme and source tells name, mode, source and dtypes."""
    mode = {"gptq": "gptq/4/32", "awq": "awq/4/32"}.get(scheme, scheme)
    policy = pc.QuantizedDTypePolicy(mode, source)
    assert policy == pc.get(f"{mode}_from_{source}")
    assert policy.name == f"{mode}_from_{source}"
    assert (policy.quantization_mode, policy.source_name) == (scheme, source)
    assert policy.source_policy == pc.DTypePolicy(source)
    assert policy.compute_dtype == pc.DTypePolicy(source).compute_dtype


@pytest.mark.parametrize(
    ("name", "kind", "attributes"),
    [
        pytest.param("int8_from_float32", pc.QuantizedDTypePolicy, {}, id="int8"),
        pytest.param("int8/weight_only_from_float16", pc.QuantizedDTypePolicy, {}, id="weights"),
        pytest.param("int4_from_float32", pc.QuantizedDTypePolicy, {}, id="int4-bare"),
        pytest.param(
            "float8_from_float32",
            pc.QuantizedFloat8DTypePolicy,
            {"amax_history_length": 1024, "default_amax_history_length": 1024},
            id="float8",
        ),
        pytest.param("float8/dynamic_from_float32", pc.QuantizedDTypePolicy, {}, id="dynamic"),
        pytest.param("int4/64_from_float32", pc.Int4DTypePolicy, {"block_size": 64}, id="int4"),
        pytest.param(
            "gptq/3/-1_from_float32",
            pc.GPTQDTypePolicy,
            {"weight_bits": 3, "group_size": -1},
            id="gptq",
        ),
        pytest.param(
            "awq/4/128_from_float32",
            pc.AWQDTypePolicy,
            {"weight_bits": 4, "group_size": 128},
            id="awq",
        ),
        pytest.param("ternary_from_float32", pc.TernaryDTypePolicy, {}, id="ternary"),
    ],
)
def test_class_of_a_name(name, kind, attributes):
    """Each mode has one class, with the numbers of the mode as attributes and its name in repr."""
    policy = pc.get(name)
    assert type(policy) is kind
    assert {key: getattr(policy, key) for key in attributes} == attributes
    assert repr(policy) == f'<{kind.__name__} "{name}">'


@pytest.mark.parametrize("kind", [pc.DTypePolicy, pc.FloatDTypePolicy])
def test_repr_of_a_float_policy(kind):
    """A float policy and its alias show themselves as DTypePolicy."""
    assert repr(kind("mixed_float16")) == '<DTypePolicy "mixed_float16">'


EXAMPLES = [
    pytest.param(policy, id=policy.name)
    for policy in (
        pc.DTypePolicy("mixed_float16"),
        pc.FloatDTypePolicy("bfloat16"),
        pc.QuantizedDTypePolicy("int8", "mixed_bfloat16"),
        pc.QuantizedFloat8DTypePolicy("float8", "mixed_float16", amax_history_length=7),
        pc.Int4DTypePolicy("int4/128", "float32"),
        pc.GPTQDTypePolicy("gptq/4/128", "float32"),
        pc.AWQDTypePolicy("awq/4/128", "float32"),
        pc.TernaryDTypePolicy("ternary", "float32"),
    )
]


@pytest.mark.parametrize("policy", EXAMPLES)
def test_copies_are_equal(policy):
    """copy, deepcopy, pickle and the config of a policy of each class give an equal one."""
    kind = type(policy)
    for again in (
        copy.copy(policy),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        kind.from_config(policy.get_config()),
        pc.deserialize(pc.serialize(policy)),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert type(again) is kind
        assert repr(again) == repr(policy)


@pytest.mark.parametrize("policy", EXAMPLES)
@pytest.mark.parametrize("attribute", ["name", "_name", "compute_dtype", "new"])
def test_policies_are_immutable(policy, attribute):
    """No attribute of a policy can be set or deleted, and the policy stays as it was."""
    before = dict(vars(policy))
    with pytest.raises(AttributeError, match="is immutable"):
        setattr(policy, attribute, "float64")
    with pytest.raises(AttributeError, match="is immutable"):
        delattr(policy, attribute)
    assert vars(policy) == before


def test_policies_are_hashable():
    """Equal policies are one element of a set, one key of a dict and one entry of a cache."""
    asked = []
    cached = functools.lru_cache(asked.append)
    for _ in range(2):
        cached(pc.QuantizedFloat8DTypePolicy("float8", "float32", 7))
    assert len(asked) == 1
    assert len({pc.DTypePolicy("float32"), pc.DTypePolicy("float32")}) == 1
    assert {pc.DTypePolicy("float32"): 1}[pc.FloatDTypePolicy("float32")] == 1


@given(st.lists(testing.policies(), min_size=2, max_size=2))
def test_equality_is_that_of_configs(pair):
    """Two policies are equal exactly if class and config are, and then their hashes are."""
    first, second = pair
    same = pc.serialize(first) == pc.serialize(second)
    assert (first == second) is same
    assert not same or hash(first) == hash(second)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("mixed_bfloat16", id="its-name"),
        pytest.param(pc.DTypePolicy("bfloat16"), id="another-name"),
        pytest.param(pc.QuantizedDTypePolicy("int8", "mixed_bfloat16"), id="quantized"),
        pytest.param(pc.DTypePolicyMap("mixed_bfloat16"), id="a-map"),
        pytest.param(None, id="none"),
    ],
)
def test_unequal(other):
    """A policy equals no text, no policy of another name or kind, and no map."""
    policy = pc.DTypePolicy("mixed_bfloat16")
    assert policy != other
    assert other != policy


def test_equality_leaves_the_answer_to_foreign_objects():
    """An object that decides itself what it equals is asked."""
    assert pc.DTypePolicy("float32") == mock.ANY


@pytest.mark.parametrize("length", [1, 16, np.int64(16), np.uint8(7), 2**20], ids=repr)
def test_amax_history_length(length):
    """Any integer from 1 to 2**20 is a history length, and is kept as a plain one."""
    policy = pc.QuantizedFloat8DTypePolicy("float8", "float32", length)
    assert policy.amax_history_length == length
    assert type(policy.amax_history_length) is int


@pytest.mark.parametrize("kind", [pc.DTypePolicy, pc.FloatDTypePolicy])
@pytest.mark.parametrize("default", SOURCES)
def test_none_takes_the_default_policy(kind, default):
    """A policy without a name is the default policy."""
    pc.set_dtype_policy(default)
    assert kind() == kind(None) == pc.get(None) == pc.DTypePolicy(default)


@pytest.mark.parametrize("default", ["float32", "bfloat16", "mixed_bfloat16"])
def test_no_source_takes_that_of_the_default_policy(default):
    """A quantized policy without a source takes that of the default, quantized or not."""
    for given_default in (default, f"float8_from_{default}"):
        pc.set_dtype_policy(given_default)
        assert pc.QuantizedDTypePolicy("int8").name == f"int8_from_{default}"
        assert pc.QuantizedFloat8DTypePolicy("float8").name == f"float8_from_{default}"
        assert pc.DTypePolicy().name == default


@pytest.mark.parametrize("name", ["int8_from_mixed_bfloat16", "int4/64_from_float32"])
def test_the_older_form_with_one_argument(name):
    """A whole name as the one argument, or as `name` in a config, gives the policy too."""
    kind = type(pc.get(name))
    assert kind(name) == pc.QuantizedDTypePolicy(name) == pc.get(name)
    assert kind.from_config({"name": name}) == pc.get(name)


def test_a_users_subclass():
    """A subclass keeps its class and its own behaviour, and equals no policy of its base."""

    class Stated(pc.QuantizedDTypePolicy):
        @property
        def statement(self):
            return f"{self.name}!"

    policy = Stated("int8", "float32")
    assert (type(policy), policy.statement) == (Stated, "int8_from_float32!")
    assert policy == Stated("int8_from_float32")
    assert policy != pc.get("int8_from_float32")
    assert repr(policy) == '<Stated "int8_from_float32">'
    assert pc.get(policy) is policy
    assert type(copy.deepcopy(policy)) is Stated
    with pytest.raises(ValueError, match="carried by QuantizedFloat8DTypePolicy"):
        Stated("float8", "float32")
