"""What importing the package does, and what it offers."""

import importlib
import inspect
import json
import types

import pytest

import policy_core as pc

FRAMEWORKS = ("torch", "jax", "tensorflow", "keras", "flax", "equinox")
PROBE = f"""
import sys
{{code}}
print(" ".join(name for name in {FRAMEWORKS} if name in sys.modules))
"""
USES = {
    "import": "import policy_core",
    "doors": "from policy_core import config, dtype_policies, errors, mixed_precision",
    "use": """
import policy_core as pc, numpy as np
pc.get("int8_from_mixed_bfloat16"), pc.get(np.float32), pc.available_backends()
pc.deserialize(pc.serialize(pc.DTypePolicyMap(None, {"a/.*": "float16"})))
pc.convert_input({"x": np.ones(2)}, "mixed_bfloat16")
""",
}


@pytest.mark.parametrize("use", USES)
def test_no_framework_is_imported(run_python, use):
    """Importing the package, its modules, and using it on numpy imports no framework."""
    assert run_python(PROBE.format(code=USES[use])).split() == []


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "keras"])
def test_the_probe_can_fail(run_python, framework):
    """The probe of the test before sees a framework that a module imports."""
    fake = f"import types; sys.modules[{framework!r}] = types.ModuleType({framework!r})"
    code = f"import policy_core\n{fake}\nimport {framework}"
    assert run_python(PROBE.format(code=code)).split() == [framework]


def test_the_probe_sees_a_real_import(run_python):
    """The probe sees jax when it is really imported beside the package."""
    assert "jax" in run_python(PROBE.format(code="import policy_core, jax")).split()


def test_import_leaves_slow_modules_for_later(run_python):
    """What takes long to import is imported by what needs it; benchmarks/import_time.py times it."""
    code = """
import sys, json, numpy
before = set(sys.modules)
import policy_core
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    new = json.loads(run_python(code))
    slow = {
        "rich",
        "safetensors",
        "ml_dtypes",
        "difflib",
        "importlib.metadata",
        "hypothesis",
        "email",
    }
    assert not slow & set(new)
    assert len(new) < 60


def test_importing_leaves_the_backends_alone(run_python):
    """No backend is imported before something needs it."""
    code = """
import sys, json, policy_core
print(json.dumps([name for name in sys.modules if name.startswith("policy_")
                  and name.partition(".")[0] != "policy_core"]))
"""
    assert json.loads(run_python(code)) == []


def public_names(module):
    """Gives the names of a module without an underscore, its submodules left out."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_all_is_what_the_module_has():
    """`__all__` is sorted and lists exactly the public names."""
    assert list(pc.__all__) == sorted(pc.__all__)
    assert set(pc.__all__) - {"config", "dtype_policies", "mixed_precision"} == public_names(pc)


@pytest.mark.parametrize("name", sorted(public_names(pc)))
def test_every_public_name_is_documented(name):
    """Each public function and class, and each public attribute of a class, has a docstring."""
    thing = getattr(pc, name)
    assert inspect.getdoc(thing)
    for attribute, value in vars(thing).items() if isinstance(thing, type) else ():
        if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{attribute}"


DOORS = {
    "dtype_policies": {
        *("AWQDTypePolicy", "DTypePolicy", "DTypePolicyMap", "FloatDTypePolicy"),
        *("GPTQDTypePolicy", "Int4DTypePolicy", "QuantizedDTypePolicy"),
        *("QuantizedFloat8DTypePolicy", "TernaryDTypePolicy", "deserialize", "get", "serialize"),
    },
    "config": {"dtype_policy", "set_dtype_policy"},
    "mixed_precision": {
        *("DTypePolicy", "Policy", "dtype_policy", "global_policy", "set_dtype_policy"),
        "set_global_policy",
    },
}


@pytest.mark.parametrize("name", DOORS)
def test_doors_have_keras_names(name):
    """Each module that is named like one of Keras's offers its names, and they are ours."""
    module = importlib.import_module(f"policy_core.{name}")
    assert public_names(module) == DOORS[name]
    for thing in DOORS[name] & set(pc.__all__):
        assert getattr(module, thing) is getattr(pc, thing)


def test_doors_lack_nothing_of_keras(run_python):
    """All that the installed Keras has behind these doors is here, but for loss scaling."""
    code = """
import json
import keras
names = {door: [name for name in dir(getattr(keras, door)) if not name.startswith("_")]
         for door in ("dtype_policies", "mixed_precision")}
print(json.dumps(names))
"""
    lines = run_python(code, KERAS_BACKEND="numpy", TF_CPP_MIN_LOG_LEVEL="3").splitlines()
    for door, names in json.loads(lines[-1]).items():
        assert set(names) - {"LossScaleOptimizer"} <= DOORS[door]


def test_doors_are_attributes(run_python):
    """Code that says `keras.config` after one import works when `keras` is `policy_core`."""
    code = """
import policy_core as keras
keras.config.set_dtype_policy("mixed_bfloat16")
keras.mixed_precision.set_global_policy(keras.dtype_policies.DTypePolicy("bfloat16"))
print(keras.dtype_policies.get(None).name)
"""
    assert run_python(code) == "bfloat16\n"


def test_legacy_names():
    """The legacy module sets and gives the same default policy, under its old names."""
    from policy_core import config, mixed_precision

    mixed_precision.set_global_policy(mixed_precision.Policy("mixed_bfloat16"))
    assert mixed_precision.global_policy() == config.dtype_policy() == pc.get("mixed_bfloat16")
