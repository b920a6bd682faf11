"""Exported models and files that cross frameworks give the same numbers."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras

BACKEND = keras.config.backend()
X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


def array(tensor):
    return np.asarray(policy_keras.backend.to_numpy(tensor)).astype(np.float32)


def model():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((8,)), *layers])


LOADED = """
import sys, keras, numpy as np, policy_keras
model = keras.models.load_model(sys.argv[1])
x = np.load(sys.argv[2])
np.save(sys.argv[3], policy_keras.backend.to_numpy(model(x)))
"""
SERVED = """
import sys, numpy as np, tensorflow as tf, policy_tensorflow
saved = tf.saved_model.load(sys.argv[1])
np.save(sys.argv[3], np.asarray(saved.serve(np.load(sys.argv[2]))))
"""


def elsewhere(program, file, folder, backend):
    """Gives what another process computes."""
    np.save(folder / "x.npy", X)
    arguments = [str(file), str(folder / "x.npy"), str(folder / "y.npy")]
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=True)
    return np.load(folder / "y.npy")


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_files_cross_frameworks(backend, tmp_path):
    """A .keras file saved on one framework gives the same bits on another, in int8."""
    pytest.importorskip(backend)
    if {"torch": "jax", "jax": "tensorflow", "tensorflow": "torch"}[backend] != BACKEND:
        pytest.skip("each framework reads one other's files")
    wrapped = pc.wrap(model(), "int8_from_float32")
    wrapped.save(tmp_path / "model.keras")
    wanted = array(wrapped(X))
    assert np.array_equal(elsewhere(LOADED, tmp_path / "model.keras", tmp_path, backend), wanted)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras exports SavedModels from TensorFlow")
@pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32"])
def test_saved_model(policy, tmp_path):
    """A SavedModel serves the same bits in a process that knows the kernels and no Keras layer."""
    wrapped = pc.freeze(pc.wrap(model(), policy))
    wrapped.export(tmp_path / "saved", verbose=False)
    wanted = array(wrapped(X))
    assert np.array_equal(elsewhere(SERVED, tmp_path / "saved", tmp_path, BACKEND), wanted)


@pytest.mark.skipif(BACKEND != "torch", reason="torch.export")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.export
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_export(tmp_path):
    """`format="torch"` gives a program with the same bits."""
    import torch

    wrapped = pc.wrap(model(), "int8_from_float32")
    signature = [keras.InputSpec(shape=X.shape, dtype="float32")]
    wrapped.export(tmp_path / "m.pt2", format="torch", verbose=False, input_signature=signature)
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert np.array_equal(array(program(torch.from_numpy(X)).detach()), array(wrapped(X)))


@pytest.mark.skipif(BACKEND != "jax", reason="JAX refuses to export custom calls")
@pytest.mark.filterwarnings("ignore:The `native_serialization` parameter:DeprecationWarning")
def test_jax_refuses(tmp_path):
    """On JAX an export of native kernels is an error that names the call, not other numbers."""
    wrapped = pc.wrap(model(), "int8_from_float32")
    with pytest.raises(ValueError, match="policy_jax_linear"):
        wrapped.export(tmp_path / "saved", verbose=False)
