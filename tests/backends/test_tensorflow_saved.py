"""SavedModels in other processes, and replicas of a strategy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import policy_core as pc
import policy_tensorflow as pt
from policy_tensorflow import _native

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}

SERVE = """
import sys
{first}
import numpy as np
import tensorflow as tf
{second}
for folder in sys.argv[1:]:
    x, y = (np.load(folder + "/" + name + ".npy") for name in "xy")
    model = tf.saved_model.load(folder)
    assert np.array_equal(np.asarray(model(x), np.float32), y), folder
    served = model.signatures["serving_default"](tf.constant(x))
    assert np.array_equal(np.asarray(list(served.values())[0], np.float32), y), folder
    with tf.GradientTape() as tape:
        x = tf.constant(x)
        tape.watch(x)
        loss = tf.reduce_sum(tf.cast(model(x), tf.float32))
    assert np.isfinite(tape.gradient(loss, x)).all(), folder
print("served")
"""


class Model(tf.Module):
    """A model with a signature of unknown batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [pt.Linear(8, 16), pt.LayerNorm(16), pt.Linear(16, 4)]

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=ENVIRONMENT,
    )


def saved(folder: Path, policy: str, frozen: bool) -> None:
    model = pc.wrap(Model(), policy)
    with pt.training():
        for layer in model.layers:
            layer(tf.ones((2, layer.weight.shape[0])))
    model = pc.freeze(model) if frozen else model
    y = model(X)
    tf.saved_model.save(model, str(folder), signatures=model.__call__)
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", np.asarray(y, np.float32))


def test_saved_models_are_served_elsewhere(tmp_path: Path) -> None:
    """A process that imports policy_core and nothing else of ours serves them, with the same bits."""
    for name, policy, frozen in [
        ("int8", "int8_from_float32", False),
        ("frozen", "float8_from_mixed_bfloat16", True),
        ("training", "float8_from_float32", False),
        ("dynamic", "float8/dynamic_from_float32", False),
    ]:
        saved(tmp_path / name, policy, frozen)
    code = SERVE.format(first="import policy_core", second="")
    done = python(code, *map(str, tmp_path.iterdir()))
    assert done.stdout == "served\n", done.stderr[-2000:]


def test_order_of_imports_does_not_matter(tmp_path: Path) -> None:
    """policy_core may also be imported after TensorFlow."""
    saved(tmp_path, "int8_from_float32", False)
    done = python(SERVE.format(first="", second="import policy_core"), str(tmp_path))
    assert done.stdout == "served\n", done.stderr[-2000:]


@pytest.mark.skipif(not _native.available(), reason="the kernels were not built")
def test_missing_import_is_named(tmp_path: Path) -> None:
    """Without that import TensorFlow's error names what to import."""
    saved(tmp_path, "int8_from_float32", False)
    done = python(SERVE.format(first="", second=""), str(tmp_path))
    assert done.returncode != 0
    assert "Op type not registered 'ImportPolicyCore>LinearV" in done.stderr


def test_importing_the_core_imports_no_framework() -> None:
    """The core waits for TensorFlow's import and does not bring it about; then the backend is there."""
    code = """
import sys, policy_core
assert "tensorflow" not in sys.modules and "policy_tensorflow" not in sys.modules
policy_core.available_backends()
assert "tensorflow" not in sys.modules
before = len(sys.meta_path)
import tensorflow
assert "policy_tensorflow" in sys.modules
assert len([f for f in sys.meta_path if type(f).__module__.startswith("policy_core")]) == 0
"""
    done = python(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_replicas_share_an_amax() -> None:
    """On two logical devices a model trains as on one; amax histories hold the maximum of both."""
    script = Path(__file__).with_name("tensorflow_replicas_process.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for policy, found in json.loads(done.stdout).items():
        both, one = found["losses"]
        np.testing.assert_allclose(both, one, rtol=1e-4)
        np.testing.assert_allclose(*found["histories"], rtol=1e-5)
        assert found["mirrored"], policy
