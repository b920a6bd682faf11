"""`convert_input` on nests of numpy arrays and everything else."""

import collections
import dataclasses
import types

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policy_core as pc
from policy_core.errors import BackendError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(x) for x in ("float16", "float32", "float64")] + [BFLOAT16]
CODES = [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")
]
Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    x: object
    ids: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    total: object = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        assert self.x is not None


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_become_the_compute_dtype(dtype, policy):
    """A float array of 16 bits or more gets the compute dtype, and its values are cast."""
    x = np.array([[1.5, -2.0]], dtype)
    y = pc.convert_input(x, policy)
    assert y.dtype.name == pc.get(policy).compute_dtype
    assert y.shape == x.shape
    np.testing.assert_array_equal(y.astype(np.float64), x.astype(np.float64))


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(np.array([2909], np.int32), id="int32"),
        pytest.param(np.array([2**53 + 1], np.int64), id="int64"),
        pytest.param(np.array([250], np.uint8), id="uint8"),
        pytest.param(np.array([True]), id="bool"),
        pytest.param(np.array([1j]), id="complex"),
        pytest.param(np.array(["text"]), id="array-of-text"),
        pytest.param(np.array([object()]), id="array-of-objects"),
        pytest.param(np.array([(1.0,)], [("a", "f4")]), id="structured"),
        pytest.param(np.array(["2020-01-01"], "datetime64[D]"), id="dates"),
        *(pytest.param(np.array([1.0], dtype), id=str(dtype)) for dtype in CODES),
        pytest.param(np.array([3], ml_dtypes.int4), id="int4"),
        pytest.param(np.random.default_rng(0), id="random-generator"),
        pytest.param(types.SimpleNamespace(x=np.ones(2)), id="foreign-object"),
        pytest.param({1.0, 2.0}, id="set"),
        pytest.param(2909, id="python-int"),
        pytest.param(0.5, id="python-float"),
        pytest.param("text", id="text"),
        pytest.param(b"bytes", id="bytes"),
        pytest.param(None, id="none"),
        pytest.param(Batch, id="a-class"),
    ],
)
def test_everything_else_passes_as_it_is(leaf):
    """What is no float array of 16 bits or more is given back itself, alone and in a nest."""
    assert pc.convert_input(leaf, "mixed_bfloat16") is leaf
    nest = {"leaf": [leaf, (leaf,)], "x": np.ones(1)}
    converted = pc.convert_input(nest, "mixed_bfloat16")
    assert converted["leaf"][0] is converted["leaf"][1][0] is leaf
    assert converted["x"].dtype == BFLOAT16


NESTS = [
    pytest.param(lambda x: {"a": x, "b": {"c": x}}, id="dict"),
    pytest.param(lambda x: collections.OrderedDict(b=x, a=1), id="ordered-dict"),
    pytest.param(lambda x: collections.defaultdict(list, a=x), id="default-dict"),
    pytest.param(lambda x: [x, [x, 3]], id="list"),
    pytest.param(lambda x: (x, (x, None)), id="tuple"),
    pytest.param(lambda x: Pair(x, "text"), id="named-tuple"),
    pytest.param(lambda x: Batch(x, ids=2909), id="dataclass"),
    pytest.param(lambda x: Frozen(x), id="frozen-dataclass"),
    pytest.param(lambda x: {"a": [Pair(x, Batch(x, Frozen((x,))))]}, id="all-together"),
]


def leaves(nest):
    """Gives the arrays of a nest in order."""
    if isinstance(nest, np.ndarray):
        return [nest]
    if dataclasses.is_dataclass(nest):
        nest = [getattr(nest, field.name) for field in dataclasses.fields(nest)]
    if isinstance(nest, dict):
        nest = list(nest.values())
    return (
        [leaf for item in nest for leaf in leaves(item)] if isinstance(nest, (list, tuple)) else []
    )


def shape(nest):
    """Gives the structure of a nest as text, its arrays left out."""
    return repr(nest).replace("dtype=", "").replace("float32", "F").replace("bfloat16", "F")


@pytest.mark.parametrize("nest", NESTS)
def test_nests_keep_their_structure(nest):
    """A nest comes back of the same classes and order, with its float arrays cast."""
    x = np.ones(2, np.float32)
    given_nest = nest(x)
    converted = pc.convert_input(given_nest, "mixed_bfloat16")
    assert type(converted) is type(given_nest)
    assert shape(converted) == shape(nest(x.astype(BFLOAT16)))
    assert leaves(converted)
    assert {leaf.dtype for leaf in leaves(converted)} == {BFLOAT16}
    assert all(leaf is x for leaf in leaves(given_nest))


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize(
    ("policy", "autocast"),
    [
        pytest.param("float32", True, id="same-dtype"),
        pytest.param("mixed_bfloat16", False, id="no-autocast"),
        pytest.param("int32", True, id="integer-policy"),
        pytest.param("bool", True, id="bool-policy"),
    ],
)
def test_what_needs_no_change_is_given_back(nest, policy, autocast):
    """When nothing has to be cast, the nest itself is the result."""
    given_nest = nest(np.ones(2, np.float32))
    assert pc.convert_input(given_nest, policy, autocast) is given_nest


def test_only_what_changes_is_rebuilt():
    """The parts of a nest that hold nothing to cast are the same objects in the result."""
    ids, x = [np.arange(3)], np.ones(2, np.float32)
    converted = pc.convert_input({"ids": ids, "x": x}, "mixed_bfloat16")
    assert converted["ids"] is ids
    assert converted["x"] is not x


@given(
    st.recursive(
        st.sampled_from([np.ones(1, np.float32), np.arange(2), None, 1.5, "a"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.tuples(inner, inner)
        ),
        max_leaves=12,
    )
)
def test_any_nest(nest):
    """Of any nest, the float arrays and nothing else are cast, and twice is as once."""
    converted = pc.convert_input(nest, "float16")
    before = [leaf.dtype for leaf in leaves(nest)]
    expected = [np.dtype("float16") if x.kind == "f" else x for x in before]
    assert [leaf.dtype for leaf in leaves(converted)] == expected
    assert pc.convert_input(converted, "float16") is converted


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_casts_to_float8_saturate(name):
    """A float8 policy casts 1e6 and infinity to the largest value, and keeps NaN."""
    x = np.array([1e6, -np.inf, np.nan, 1.0], np.float32)
    y = pc.convert_input(x, name)
    largest = float(ml_dtypes.finfo(y.dtype).max)
    np.testing.assert_array_equal(y.astype(np.float32), [largest, -largest, np.nan, 1.0])
    assert y.dtype.name == name


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e8m0fnu"])
def test_casts_to_unused_float8_formats_are_refused(name):
    """A float8 format that no mode uses is refused as a target."""
    with pytest.raises(ValueError, match=f"Cannot cast to '{name}'"):
        pc.convert_input(np.ones(1, np.float32), name)


def test_the_method_of_a_policy():
    """A policy's method does the same, and takes another dtype in place of its own."""
    policy = pc.get("int8_from_mixed_bfloat16")
    x = np.ones(1, np.float32)
    assert policy.convert_input(x).dtype == BFLOAT16
    assert policy.convert_input(x, autocast=False) is x
    assert policy.convert_input(x, True, "float16").dtype == np.float16
    assert policy.convert_input(x, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="Invalid dtype: 'bogus'"):
        policy.convert_input(x, dtype="bogus")


def test_overflow_to_16_bits_shows():
    """A value that float16 cannot hold becomes an infinity, without a warning."""
    assert np.isinf(pc.convert_input(np.array([1e5], np.float32), "mixed_float16")).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("xla", "POLICY_BACKEND='xla' is not a registered backend", id="unknown"),
        pytest.param("nunpy", "Did you mean 'numpy'?", id="misspelled"),
    ],
)
def test_an_unknown_backend_is_an_error(monkeypatch, name, message):
    """Arrays without a framework need the backend that POLICY_BACKEND names; others do not."""
    monkeypatch.setenv("POLICY_BACKEND", name)
    with pytest.raises(BackendError, match=r"Registered: .*numpy") as caught:
        pc.convert_input({"x": np.ones(1)}, "float16")
    assert message in str(caught.value)
    assert pc.convert_input([1, "a"], "float16") == [1, "a"]
