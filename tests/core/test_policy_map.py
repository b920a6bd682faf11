"""Policy maps: look-up, rules as a mapping, and what is refused."""

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import policy_core as pc
from policy_core import testing

FLOAT32 = pc.DTypePolicy("float32")
INT8 = pc.QuantizedDTypePolicy("int8", "float32")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param("encoder/0/dense", "bfloat16", id="exact"),
        pytest.param("encoder/1/dense", "int8_from_float32", id="pattern"),
        pytest.param("decoder", "float16", id="exact-name"),
        pytest.param("decoder/0", "float32", id="no-child-of-an-exact-name"),
        pytest.param("decoder_norm", "float32", id="no-prefix"),
        pytest.param("my_model/conv2d_1/kernel", "float32", id="no-match-in-the-middle"),
        pytest.param("model/dense.1", "float64", id="exact-beats-pattern"),
        pytest.param("model/dense_1", "float32", id="exact-path-is-a-pattern-too"),
        pytest.param("", "float32", id="root"),
    ],
)
def test_look_up(path, name):
    """An exact path comes first, then the one pattern that matches it whole, then the default."""
    policies = pc.DTypePolicyMap(
        "float32",
        {
            "encoder/0/dense": "bfloat16",
            "encoder/.*": INT8,
            "decoder": "float16",
            "conv2d.*kernel": "float16",
            "model/dense.1": "float64",
            "model/dense_1": "float32",
        },
    )
    assert policies[path].name == name


def test_two_patterns_that_match_are_an_error():
    """A path that two patterns match is refused with both keys; an exact key settles it."""
    policies = pc.DTypePolicyMap("float32", {"a/.*": "float16", "a/b/.*": "bfloat16"})
    message = "Path 'a/b/c' matches multiple dtype policy specification keys: ['a/.*', 'a/b/.*']"
    with pytest.raises(ValueError, match=re.escape(message)):
        policies["a/b/c"]
    policies["a/b/c"] = "float64"
    assert policies["a/b/c"].name == "float64"
    assert policies.matching_keys("a/b/d") == ["a/.*", "a/b/.*"]


def test_negated_and_positive_rules_live_side_by_side():
    """Attention stays float under a rule for it, beside a rule for all that is not attention."""
    policies = pc.DTypePolicyMap("float16", {".*attn.*": "float32", "(?!.*attn).*": INT8})
    assert policies["encoder/0/attn/query"].name == "float32"
    assert policies["encoder/0/mlp/up"].name == "int8_from_float32"


def test_a_map_is_a_policy():
    """A map's own dtypes, mode and name are those of its default policy."""
    policies = pc.DTypePolicyMap("int8_from_mixed_bfloat16", {"a": "float64"})
    assert isinstance(policies, pc.DTypePolicy)
    assert pc.get(policies) is policies
    assert policies.name == "map_int8_from_mixed_bfloat16"
    assert (policies.compute_dtype, policies.variable_dtype) == ("bfloat16", "float32")
    assert (policies.quantization_mode, str(policies.quantization)) == ("int8", "int8")
    assert policies.source_policy.name == "mixed_bfloat16"


def test_repr_names_default_and_rules():
    """A map shows its default policy and its rules by name."""
    policies = pc.DTypePolicyMap(None, {"layer/dense_0": "mixed_bfloat16"})
    expected = (
        "<DTypePolicyMap default_policy=float32, mapping=[('layer/dense_0', 'mixed_bfloat16')]>"
    )
    assert repr(policies) == expected


def test_no_default_follows_the_default_policy():
    """A map without a default answers with the default policy of the moment."""
    policies = pc.DTypePolicyMap()
    for name in ("bfloat16", "int8_from_float32"):
        with pc.policy_scope(name):
            assert policies["anything"].name == policies.default_policy.name == name
            assert policies.name == f"map_{name}"


class MapAgainstDict(RuleBasedStateMachine):
    """A map does what a dict does, except that a key cannot be set twice."""

    def __init__(self):
        super().__init__()
        self.policies = pc.DTypePolicyMap("float32")
        self.model: dict[str, pc.DTypePolicy] = {}

    keys = st.sampled_from(["a", "a/b", "a/.*", "c", "[cd]"])

    @rule(key=keys, policy=testing.policies())
    def set(self, key, policy):
        if key in self.model:
            with pytest.raises(ValueError, match=re.escape(f"{key} already exist in the DType")):
                self.policies[key] = policy
        else:
            self.policies[key] = self.model[key] = policy

    @rule(key=keys)
    def delete(self, key):
        if key in self.model:
            del self.policies[key], self.model[key]
        else:
            with pytest.raises(KeyError):
                del self.policies[key]

    @rule(key=keys, default=st.none() | st.just(FLOAT32))
    def pop(self, key, default):
        assert self.policies.pop(key, default) == self.model.pop(key, default)
        with pytest.raises(KeyError):
            self.policies.pop(key)

    @rule(key=keys, policy=testing.policies())
    def setdefault(self, key, policy):
        assert self.policies.setdefault(key, policy) == self.model.setdefault(key, policy)

    @rule(more=st.dictionaries(keys, testing.policies()))
    def update(self, more):
        if self.model.keys() & more.keys():
            with pytest.raises(ValueError, match="already exist"):
                self.policies.update(more)
        else:
            self.policies.update(more)
            self.model.update(more)

    @rule()
    def popitem(self):
        if self.model:
            key, policy = self.policies.popitem()
            assert self.model.pop(key) == policy

    @rule()
    def clear(self):
        self.policies.clear()
        self.model.clear()

    @invariant()
    def same(self):
        assert list(self.policies) == list(self.model)
        assert len(self.policies) == len(self.model)
        assert list(self.policies.items()) == list(self.model.items())
        assert list(self.policies.values()) == list(self.model.values())
        assert self.policies.keys() == self.model.keys()
        assert "unknown" not in self.policies
        assert ("unknown", FLOAT32) not in self.policies.items()
        assert self.policies == pc.DTypePolicyMap("float32", self.model)


test_a_map_behaves_as_a_dict = MapAgainstDict.TestCase


@given(testing.policy_maps())
def test_copies_are_equal_and_independent(policies):
    """copy, deepcopy, pickle and the config of a map give an equal map of its own."""
    for again in (
        copy.copy(policies),
        copy.deepcopy(policies),
        pickle.loads(pickle.dumps(policies)),
        pc.DTypePolicyMap.from_config(policies.get_config()),
    ):
        assert again == policies
        again["a key that paths never have"] = "float32"
        assert again != policies


def test_equality():
    """Maps are equal when their defaults and rules are, in any order; a map equals no dict."""
    rules = {"a": INT8, "b": FLOAT32}
    policies = pc.DTypePolicyMap("float32", rules)
    assert policies == pc.DTypePolicyMap(FLOAT32, dict(reversed(rules.items())))
    assert policies != pc.DTypePolicyMap(None, rules)
    assert policies != pc.DTypePolicyMap("float32", {"a": INT8})
    assert policies != rules


def test_the_callers_dict_is_copied():
    """What happens to the caller's dict later does not reach the map, nor the reverse."""
    rules = {"a": "float32"}
    policies = pc.DTypePolicyMap(None, rules)
    rules["b"] = "float16"
    policies["c"] = "float16"
    assert list(policies) == ["a", "c"]
    assert rules == {"a": "float32", "b": "float16"}


def test_a_map_cannot_be_hashed_nor_its_attributes_set():
    """A map is mutable in its rules alone: it has no hash, and no attribute can be set."""
    policies = pc.DTypePolicyMap("float32")
    with pytest.raises(TypeError, match="unhashable"):
        hash(policies)
    with pytest.raises(AttributeError, match="immutable"):
        policies.default_policy = FLOAT32


BAD_RULES = [
    pytest.param("a", 123, ValueError, "Cannot interpret the assigned value by", id="number"),
    pytest.param("a", "bogus", ValueError, "Cannot convert 'bogus'", id="unknown-policy"),
    pytest.param("a", "int8_from_float16", ValueError, "doesn't work well", id="misfit"),
    pytest.param("a", pc.DTypePolicyMap(), ValueError, "a map cannot hold a map", id="map"),
    pytest.param("a", {"class_name": "os"}, ValueError, "Unknown class 'os'", id="config"),
    pytest.param(1, "float32", TypeError, "A key must be a string. Received: 1", id="key"),
    pytest.param(None, "float32", TypeError, "A key must be a string", id="key-none"),
    pytest.param("[", "float32", ValueError, "'[' is not a valid pattern", id="pattern"),
    pytest.param("(a+)+\\1", "float32", ValueError, "could take unbounded time", id="hostile"),
    pytest.param("a" * 1001, "float32", ValueError, "A pattern may have 1000", id="long"),
]


@pytest.mark.parametrize(("key", "policy", "error", "message"), BAD_RULES)
def test_bad_rules_are_refused(key, policy, error, message):
    """A bad rule is refused by every door with the same reason, and no map has changed."""
    policies = pc.DTypePolicyMap("float32", {"old": "float16"})
    doors = (
        lambda: policies.__setitem__(key, policy),
        lambda: policies.setdefault(key, policy),
        lambda: policies.update({"new": "float16", key: policy}),
        lambda: pc.DTypePolicyMap("float32", {"new": "float16", key: policy}),
    )
    for door in doors:
        with pytest.raises(error, match=re.escape(message)):
            door()
        assert list(policies.items()) == [("old", pc.DTypePolicy("float16"))]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param((None, 123), TypeError, "If specified, `policy_map` must be a dict", id="int"),
        pytest.param((None, [("a", "float32")]), TypeError, "of type <class 'list'>", id="list"),
        pytest.param((None, FLOAT32), TypeError, "must be a dict", id="policy"),
        pytest.param((None, pc.DTypePolicyMap()), TypeError, "must be a dict", id="map"),
        pytest.param((pc.DTypePolicyMap(),), ValueError, "cannot be a `DTypePolicyMap`", id="dflt"),
        pytest.param(("bogus",), ValueError, "Cannot convert 'bogus'", id="default-name"),
        pytest.param((123,), ValueError, "Cannot interpret `dtype` argument", id="default-int"),
    ],
)
def test_constructor_refuses(arguments, error, message):
    """A wrong default policy or `policy_map` is refused with what came."""
    with pytest.raises(error, match=re.escape(message)):
        pc.DTypePolicyMap(*arguments)


@pytest.mark.parametrize("path", [None, 1, b"a", ("a",)], ids=repr)
def test_only_texts_are_paths(path):
    """A look-up of what is no string is refused."""
    with pytest.raises(TypeError, match=r"A path must be a string\. Received: ") as caught:
        pc.DTypePolicyMap("float32")[path]
    assert repr(path) in str(caught.value)
