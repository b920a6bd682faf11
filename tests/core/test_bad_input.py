"""Wrong types and values, given to every public function: one clear error, and no change.

What each kind of object refuses in detail stands in its own file; this table has each door once.
"""

import re

import numpy as np
import pytest

import policy_core as pc
import policy_numpy as pn
from policy_core.errors import BackendError

W = np.ones((4, 4), np.float32)


class Unserializable:
    def __repr__(self):
        raise RuntimeError("no repr")


def model_of_one():
    return pn.Sequential([pn.Dense(4, 4, seed=0)])


@pytest.mark.parametrize(
    ("call", "error", "shown"),
    [
        pytest.param(lambda: pc.get("flaot32"), ValueError, "Did you mean 'float32'?", id="get"),
        pytest.param(lambda: pc.get(123), ValueError, "dtype=123", id="get-type"),
        pytest.param(lambda: pc.get({"a": 1}), ValueError, "{'a': 1}", id="get-config"),
        pytest.param(
            lambda: pc.get(Unserializable()), ValueError, "<Unserializable object>", id="get-repr"
        ),
        pytest.param(lambda: pc.serialize({1, 2}), TypeError, "{1, 2}", id="serialize"),
        pytest.param(lambda: pc.deserialize(123), TypeError, "123", id="deserialize"),
        pytest.param(
            lambda: pc.deserialize({}, custom_objects=3),
            TypeError,
            "must be a dict from names to classes. Received: 3",
            id="objects",
        ),
        pytest.param(
            lambda: pc.set_dtype_policy(1.5), ValueError, "policy=1.5 (of type", id="default"
        ),
        pytest.param(lambda: pc.policy_scope(1.5).__enter__(), ValueError, "1.5", id="scope"),
        pytest.param(lambda: pc.backend("xla"), BackendError, "name='xla'", id="backend"),
        pytest.param(lambda: pc.backend("jaxx"), BackendError, "Registered: ", id="backend-known"),
        pytest.param(lambda: pc.backend(3), TypeError, "Received: 3", id="backend-type"),
        pytest.param(
            lambda: pc.convert_input(W, "bogus"), ValueError, "'bogus'", id="convert-policy"
        ),
        pytest.param(lambda: pc.convert_input(W, 123), ValueError, "123", id="convert-type"),
        pytest.param(
            lambda: pc.register_serializable(3), TypeError, "package=3", id="register-package"
        ),
        pytest.param(lambda: pc.register_serializable()(3), TypeError, "3", id="register"),
        pytest.param(
            lambda: pc.custom_object_scope(3).__enter__(), TypeError, "3", id="object-scope"
        ),
        pytest.param(lambda: pc.DTypePolicy(3), TypeError, "name=3", id="policy"),
        pytest.param(lambda: pc.FloatDTypePolicy("x"), ValueError, "'x'", id="alias"),
        pytest.param(lambda: pc.QuantizedDTypePolicy(3), TypeError, "mode=3", id="quantized"),
        pytest.param(
            lambda: pc.QuantizedFloat8DTypePolicy("float8", "float32", 0),
            ValueError,
            "amax_history_length=0",
            id="float8",
        ),
        pytest.param(lambda: pc.Int4DTypePolicy("int4/0"), ValueError, "'int4/0'", id="int4"),
        pytest.param(lambda: pc.GPTQDTypePolicy("gptq/5/8"), ValueError, "not 5", id="gptq"),
        pytest.param(lambda: pc.AWQDTypePolicy("awq/3/8"), ValueError, "not 3", id="awq"),
        pytest.param(lambda: pc.TernaryDTypePolicy("int8"), ValueError, "'int8'", id="ternary"),
        pytest.param(lambda: pc.DTypePolicyMap(3), ValueError, "dtype=3", id="map-default"),
        pytest.param(lambda: pc.DTypePolicyMap(None, 3), TypeError, "policy_map=3", id="map"),
        pytest.param(
            lambda: pc.wrap(object(), "int8_from_float32"), TypeError, "object", id="wrap"
        ),
        pytest.param(lambda: pc.unwrap(3), TypeError, "3", id="unwrap"),
        pytest.param(lambda: pc.freeze("model"), TypeError, "'model'", id="freeze"),
        pytest.param(lambda: pc.report(None), TypeError, "None", id="report"),
        pytest.param(lambda: pc.register_layer(3, None), TypeError, "3", id="register-layer"),
        pytest.param(lambda: pc.save(3, "nowhere.safetensors"), TypeError, "3", id="save"),
        pytest.param(
            lambda: pc.load(model_of_one(), "/nowhere.safetensors"), OSError, "nowhere", id="load"
        ),
    ],
)
def test_each_public_function_refuses(call, error, shown):
    """A wrong value given to any public function is one error that shows it; nothing changes."""
    pc.set_dtype_policy("bfloat16")
    with pytest.raises(error, match=re.escape(shown)) as caught:
        call()
    assert len(str(caught.value)) < 2000
    assert pc.dtype_policy().name == "bfloat16"


@pytest.mark.parametrize(
    ("policy", "error", "shown"),
    [
        pytest.param("bogus", ValueError, "'bogus'", id="name"),
        pytest.param(123, ValueError, "123", id="type"),
        pytest.param({"0": "bogus"}, ValueError, "'bogus'", id="rule"),
        pytest.param({"[": "float32"}, ValueError, "'[' is not a valid pattern", id="pattern"),
        pytest.param({"1": "float32"}, ValueError, "matches no layer", id="path"),
        pytest.param("int4/32_from_float32", NotImplementedError, "'int4/32'", id="no-kernel"),
    ],
)
def test_a_failing_wrap_leaves_the_model(policy, error, shown):
    """A policy that cannot be applied is refused, and the model is what it was."""
    model = model_of_one()
    weight = model.layers[0].weight.copy()
    with pytest.raises(error, match=re.escape(shown)):
        pc.wrap(model, policy)
    assert model.layers[0].dtype_policy is None
    np.testing.assert_array_equal(model.layers[0].weight, weight)


def test_every_public_callable_is_in_the_table():
    """The table above calls everything that the package exports, but for the report's class."""
    marks = test_each_public_function_refuses.pytestmark[0].args[1]
    called = {name for mark in marks for name in mark.values[0].__code__.co_names}
    assert set(pc.__all__) - called - {"config", "dtype_policies", "mixed_precision"} == {
        "Report",
        "available_backends",  # takes no argument
        "dtype_policy",  # takes no argument
    }
