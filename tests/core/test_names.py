"""Names, identifiers and arguments that mean no policy, or mean one that could be mistaken."""

import re

import ml_dtypes
import numpy as np
import pytest

import policy_core as pc


@pytest.mark.parametrize("name", ["uint8", "int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_a_bare_dtype_is_no_quantized_policy(name):
    """The name of a narrow dtype alone is a plain policy."""
    policy = pc.get(name)
    assert type(policy) is pc.DTypePolicy
    assert (policy.name, policy.quantization_mode) == (name, None)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(np.int8, "int8", id="numpy-type"),
        pytest.param(np.dtype("float32"), "float32", id="numpy-dtype"),
        pytest.param(ml_dtypes.bfloat16, "bfloat16", id="ml-dtypes-type"),
        pytest.param(float, "float32", id="python-type"),
    ],
)
def test_get_takes_dtypes(dtype, name):
    """A dtype of a framework is its plain policy."""
    assert pc.get(dtype) == pc.DTypePolicy(name)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        pytest.param("int4/None_from_float32", "int4/-1_from_float32", id="int4-none"),
        pytest.param("int8_from_torch.float32", "int8_from_float32", id="source-prefix"),
        pytest.param("torch.float32", "float32", id="prefix"),
        pytest.param("float", "float32", id="python-name"),
    ],
)
def test_names_are_canonical(name, canonical):
    """Two spellings of a name give equal policies with one name."""
    assert pc.get(name) == pc.get(canonical)
    assert pc.get(name).name == canonical


REFUSED_NAMES = [
    pytest.param("mixed_bfloat15", "Cannot convert", id="almost"),
    pytest.param("bogus.float16", "Cannot convert", id="unknown-prefix"),
    pytest.param("", "Cannot convert ''", id="empty"),
    pytest.param("@mixed_float16!", "Cannot convert", id="special"),
    pytest.param("mixed_float16" * 100, "Cannot convert", id="very-long"),
    pytest.param("int8_from_mixed_bfloat15", "Cannot convert", id="source"),
    pytest.param("int8_from_", "Cannot convert", id="no-source"),
    pytest.param("int8_from_int8_from_float32", "Cannot convert", id="twice"),
    pytest.param("int8_abc_", "Cannot convert `policy` into a valid pair", id="no-separator"),
    pytest.param(
        "int8_form_mixed_bfloat16",
        "Did you mean 'int8_from_mixed_bfloat16'?",
        id="misspelled-separator",
    ),
    pytest.param("mixed_bflaot16", "Did you mean 'mixed_bfloat16'?", id="misspelled"),
    pytest.param("_from_float32", "Invalid quantization mode.", id="no-mode"),
    pytest.param("int7_from_float32", "Invalid quantization mode.", id="unknown-mode"),
    pytest.param("gptq/4_from_float32", "Invalid mode", id="parameters-missing"),
    pytest.param("awq/8/128_from_float32", "only supports 4-bit", id="awq-bits"),
    pytest.param("int8_from_int32", "must be a float policy", id="int-source"),
    pytest.param("int8_from_bool", "must be a float policy", id="bool-source"),
    pytest.param("float8_from_complex64", "must be a float policy", id="complex-source"),
    pytest.param("float8_from_float8_e4m3fn", "must be a float policy", id="float8-source"),
    pytest.param("int8_from_string", "must be a float policy", id="string-source"),
    pytest.param("int8_from_float16", "doesn't work well", id="int8-float16"),
    pytest.param("int8_from_mixed_float16", "'int8_from_mixed_bfloat16'", id="int8-mixed"),
    pytest.param("int8_from_float16", "'int8/weight_only_from_float16'", id="int8-advice"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED_NAMES)
@pytest.mark.parametrize("door", [pc.get, pc.deserialize, pc.set_dtype_policy])
def test_refused_names(name, message, door):
    """A name that is no policy is refused by every door with the same reason."""
    with pytest.raises(ValueError, match=re.escape(message)):
        door(name)


@pytest.mark.parametrize("kind", [pc.DTypePolicy, pc.FloatDTypePolicy])
def test_float_classes_refuse_quantized_names(kind):
    """A float class refuses a quantized name and says who takes it."""
    with pytest.raises(ValueError, match=r"Cannot convert .* use pc\.get"):
        kind("int8_from_float32")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(lambda: pc.DTypePolicy(123), TypeError, "'name' must be a string", id="name"),
        pytest.param(
            lambda: pc.FloatDTypePolicy(b"float32"),
            TypeError,
            "Received: name=b'float32' (of type <class 'bytes'>)",
            id="bytes",
        ),
        pytest.param(
            lambda: pc.QuantizedDTypePolicy("int8", 123),
            TypeError,
            "'name' must be a string",
            id="source",
        ),
        pytest.param(
            lambda: pc.QuantizedDTypePolicy(123), TypeError, "must be a string", id="mode"
        ),
        pytest.param(
            lambda: pc.QuantizedDTypePolicy(None, "float32"),
            TypeError,
            "Received: mode=None",
            id="mode-none",
        ),
        pytest.param(
            lambda: pc.QuantizedDTypePolicy("int8_from_float32", "float32"),
            ValueError,
            "Invalid quantization mode.",
            id="source-twice",
        ),
        pytest.param(
            lambda: pc.QuantizedDTypePolicy("int8", "int8_from_float32"),
            ValueError,
            "Cannot convert",
            id="quantized-source",
        ),
        pytest.param(
            lambda: pc.QuantizedDTypePolicy("int8", ""), ValueError, "Cannot convert", id="empty"
        ),
        pytest.param(
            lambda: pc.QuantizedFloat8DTypePolicy("int8"),
            ValueError,
            "'int8' is carried by QuantizedDTypePolicy",
            id="float8-of-int8",
        ),
        pytest.param(
            lambda: pc.QuantizedFloat8DTypePolicy("float8/dynamic"),
            ValueError,
            "Invalid mode for QuantizedFloat8DTypePolicy",
            id="float8-of-dynamic",
        ),
        pytest.param(
            lambda: pc.QuantizedFloat8DTypePolicy("float7"),
            ValueError,
            "Invalid quantization mode.",
            id="float7",
        ),
        pytest.param(
            lambda: pc.Int4DTypePolicy("int4", "float32"),
            ValueError,
            "Invalid mode for Int4DTypePolicy",
            id="int4-bare",
        ),
        pytest.param(
            lambda: pc.AWQDTypePolicy("gptq/4/128", "float32"),
            ValueError,
            "'gptq/4/128' is carried by GPTQDTypePolicy",
            id="awq-of-gptq",
        ),
        *(
            pytest.param(
                lambda length=length: pc.QuantizedFloat8DTypePolicy("float8", "float32", length),
                error,
                f"{message} Received: amax_history_length={length!r}",
                id=f"history-{length!r}",
            )
            for error, message, lengths in (
                (ValueError, "must be between 1 and 1048576.", (0, -1, 2**20 + 1)),
                (TypeError, "must be an integer.", (True, 2.0, "512", None, np.float32(2))),
            )
            for length in lengths
        ),
    ],
)
def test_constructors_refuse(make, error, message):
    """A wrong argument of a constructor is refused with what was expected and what came."""
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("value", [123, 1.5, True, [], object, np.float32(3)], ids=repr)
def test_get_refuses_what_is_no_identifier(value):
    """What is neither name, dtype, config nor policy is refused and shown."""
    with pytest.raises(ValueError, match="Cannot interpret `dtype` argument") as caught:
        pc.get(value)
    assert repr(value) in str(caught.value)
