"""Configs, attributes, names and look-ups agree with the installed Keras."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from policy_core import dtype_policies

SCRIPT = pathlib.Path(__file__).with_name("keras_process.py")
SPEC = importlib.util.spec_from_file_location("keras_process", SCRIPT)
keras_process = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(keras_process)


def ours(**request):
    """Our answer, through JSON text as Keras's comes."""
    return json.loads(json.dumps(keras_process.answer(dtype_policies, request)))


@pytest.fixture(scope="module")
def keras():
    """A function that gives Keras's answer to a request."""
    if importlib.util.find_spec("keras") is None and "CI" not in os.environ:
        pytest.skip("Keras is not installed")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "KERAS_BACKEND": "numpy", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:

        def ask(**request):
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
            assert line, "Keras's process ended; its errors are in the captured stderr"
            return json.loads(line)

        yield ask
        process.stdin.close()


NAMES = (
    *("float32", "float16", "bfloat16", "float64", "mixed_float16", "mixed_bfloat16"),
    *("uint8", "int32", "bool", "string", "complex64"),
    *("int8_from_float32", "int8_from_bfloat16", "int8_from_mixed_bfloat16", "int8_from_float64"),
    *("float8_from_float32", "float8_from_mixed_float16", "float8_from_bfloat16"),
    *("int4_from_float32", "int4_from_mixed_float16", "int4/128_from_float16"),
    *("int4/-1_from_mixed_bfloat16", "gptq/4/128_from_float32", "gptq/2/-1_from_bfloat16"),
    *("gptq/8/1_from_mixed_float16", "awq/4/128_from_float32", "awq/4/-1_from_bfloat16"),
)
FLOAT8 = ["QuantizedFloat8DTypePolicy", "float8", "mixed_bfloat16", 123]
RULES = {
    "encoder/0/dense": "bfloat16",
    "encoder/.*": "int8_from_mixed_bfloat16",
    "head": FLOAT8,
    "head/[a-z]+": ["Int4DTypePolicy", "int4/32", "float32"],
    "attention/query": "mixed_float16",
}
SPECS = [
    *(pytest.param(name, id=name) for name in NAMES),
    pytest.param(["FloatDTypePolicy", "mixed_float16"], id="alias"),
    pytest.param(["DTypePolicy"], id="default-policy"),
    pytest.param(["DTypePolicy", "int8"], id="int8"),
    pytest.param(["DTypePolicy", "float8_e4m3fn"], id="float8_e4m3fn"),
    pytest.param(["QuantizedDTypePolicy", "int8"], id="default-source"),
    pytest.param(FLOAT8, id="history"),
    pytest.param({"default": None, "rules": RULES}, id="map"),
    pytest.param({"default": ["DTypePolicy", "bfloat16"], "rules": RULES}, id="map-default"),
    pytest.param({"default": FLOAT8, "rules": {}}, id="map-float8"),
]
# Keras writes such a default as it came, as a name; we write every default as a config.
NAMED_DEFAULT = pytest.param({"default": "mixed_bfloat16", "rules": RULES}, id="map-named")


@pytest.mark.parametrize("spec", SPECS)
def test_configs_and_attributes_are_keras_own(keras, spec):
    """The config of each kind of policy is Keras's as JSON text, and the attributes agree."""
    theirs, mine = keras(make=spec), ours(make=spec)
    assert "error" not in theirs
    assert json.dumps(mine["config"]) == json.dumps(theirs["config"])
    assert mine["attributes"] == theirs["attributes"]


@pytest.mark.parametrize("spec", [*SPECS, NAMED_DEFAULT])
def test_each_reads_what_the_other_wrote(keras, spec):
    """A config written by either gives the other the policy that its own config gives it."""
    written_by_keras, written_by_us = keras(make=spec)["config"], ours(make=spec)["config"]
    here, there = ours(read=written_by_keras), keras(read=written_by_us)
    assert "error" not in {**here, **there}
    assert here == ours(read=written_by_us)
    assert there["attributes"] == keras(read=written_by_keras)["attributes"]
    assert here["attributes"] == there["attributes"]


REFUSED = (
    *("", "invalid_name", "mixed_float15", "mixed_bfloat15", "@mixed_float16!", "float7"),
    *("bogus", "Float32", "int8_from_", "int8_from_mixed_bfloat15", "int8_abc_", "_from_float32"),
    *("int8_from_float16", "int8_from_mixed_float16", "int7_from_float32", "int8_form_float32"),
    *("int8_from_int8_from_float32", "int4/0_from_float32", "int4/x_from_float32"),
    *("gptq_from_float32", "gptq/4_from_float32", "gptq/5/128_from_float32", "awq_from_float32"),
    *("awq/8/128_from_float32", "awq/4/0_from_float32", "int8/128_from_float32"),
)
REFUSED_SPECS = (
    *REFUSED,
    *(["DTypePolicy", 123], ["QuantizedDTypePolicy", "int8", 123]),
    *(["QuantizedDTypePolicy", "int7", "float32"], ["Int4DTypePolicy", "int4", "float32"]),
    *(["QuantizedFloat8DTypePolicy", "float8", "float32", length] for length in ("512", 512.0)),
    {"default": None, "rules": {"a": 123}},
)


@pytest.mark.parametrize("spec", REFUSED_SPECS, ids=str)
def test_what_keras_refuses_is_refused(keras, spec):
    """A name or argument that Keras refuses is refused here too."""
    assert "error" in keras(make=spec)
    assert "error" in ours(make=spec)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("int8/weight_only_from_float16", id="mode-of-ours"),
        pytest.param("float8/dynamic_from_float32", id="mode-of-ours-float8"),
        pytest.param("ternary_from_float32", id="mode-of-a-later-keras"),
        pytest.param("int4/None_from_float32", id="form-of-old-files"),
        pytest.param("int4", id="dtype-that-keras-lacks"),
        pytest.param("int8", id="dtype-that-keras-takes-for-a-mode"),
        pytest.param("float8_e4m3fn", id="dtype-that-keras-takes-for-a-mode-float8"),
        pytest.param("jnp.float32", id="prefix"),
    ],
)
def test_what_we_take_besides(keras, name):
    """These names are refused by Keras 3.15 and mean something here."""
    assert "error" not in ours(make=name)
    if name != "ternary_from_float32":  # Keras 3.16 has it
        assert "error" in keras(make=name)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("int8_from_int32", id="source-that-is-no-float"),
        pytest.param("float8_from_bool", id="source-that-is-bool"),
        pytest.param(["QuantizedFloat8DTypePolicy", "int8", "float32"], id="float8-class-of-int8"),
        pytest.param([*FLOAT8[:3], 0], id="no-history"),
        pytest.param([*FLOAT8[:3], -1], id="negative-history"),
        pytest.param([*FLOAT8[:3], True], id="history-true"),
        pytest.param({"default": None, "rules": {"[": "float32"}}, id="malformed-pattern"),
    ],
)
def test_what_keras_takes_and_we_refuse(keras, spec):
    """These are taken by Keras, though no layer can do anything with them."""
    assert "error" not in keras(make=spec)
    assert "error" in ours(make=spec)


PATHS = (
    *("encoder/0/dense", "encoder/1/dense", "encoder", "encoder/", "my/encoder/0", "decoder"),
    *("head", "head/out", "head/OUT", "head/out/0", "attention/query", "attention/query_norm"),
    *("attention/query/sub", "", "unknown"),
)


@pytest.mark.parametrize("default", [None, "mixed_bfloat16", "int8_from_float32"])
def test_look_ups_agree(keras, default):
    """A map answers each path with the policy that Keras's map gives."""
    request = {"make": {"default": default, "rules": RULES}, "paths": PATHS}
    assert len(ours(**request)["names"]) == len(PATHS)
    assert ours(**request) == keras(**request)


def test_ambiguous_look_ups_agree(keras):
    """Two patterns that match one path are an error in both, with the same words."""
    rules = {"a/.*": "float32", "a/b/.*": "float16"}
    request = {"make": {"default": None, "rules": rules}, "paths": ["a/b/c"]}
    start = "Path 'a/b/c' matches multiple dtype policy specification keys: ['a/.*', 'a/b/.*']. "
    assert ours(**request)["error"].startswith(start)
    assert keras(**request)["error"].startswith(start)
