"""Exported models and files that cross frameworks give the same numbers."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras

# Of jax2tf, for how Keras calls it.
pytestmark = pytest.mark.filterwarnings("ignore:The `native_serialization`:DeprecationWarning")

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
import sys, numpy as np, tensorflow as tf, {module}
saved = tf.saved_model.load(sys.argv[1])
np.save(sys.argv[3], np.asarray(saved.serve(np.load(sys.argv[2]))))
"""


# What TensorFlow needs for a program: our operators, or nothing more.
MODULE = {"tensorflow": "policy_tensorflow"}.get(BACKEND, "os")
POLICIES = [
    "int8",
    "int8/weight_only",
    "float8",
    "float8, frozen",
    "float8/dynamic",
    "float8/dynamic, frozen",
    "float8/weight_only",
]


def elsewhere(program, file, folder, backend, x=X):
    """Gives what another process computes."""
    np.save(folder / "x.npy", x)
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


saved_model = pytest.mark.skipif(BACKEND == "torch", reason="Keras exports those from torch_xla")
KERNELS = BACKEND == "tensorflow"


def export(wrapped, file):
    """Exports a model; on JAX a warning says that the kernels are left behind."""
    if KERNELS:
        wrapped.export(file, verbose=False)
    else:
        with pytest.warns(UserWarning, match="KERAS_BACKEND=tensorflow, to keep the kernels"):
            wrapped.export(file, verbose=False)


def served(file, folder, x=X):
    """Gives what a process computes that knows no Keras layer."""
    return elsewhere(SERVED.format(module=MODULE), file, folder, BACKEND, x)


@saved_model
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_model(policy, tmp_path):
    """A SavedModel serves the same numbers where no Keras layer is known, int8 to the bit."""
    mode, _, frozen = policy.partition(", ")
    wrapped = pc.wrap(model(), f"{mode}_from_float32")
    wrapped = pc.freeze(wrapped) if frozen else wrapped
    export(wrapped, tmp_path / "saved")
    wanted, found = array(wrapped(X)), served(tmp_path / "saved", tmp_path)
    if KERNELS or mode == "int8":
        assert np.array_equal(found, wanted)
    else:
        # XLA adds float products in another order than the kernels.
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@saved_model
def test_unknown_sizes(tmp_path):
    """A SavedModel of embeddings, convolutions and attention takes batches of any length."""
    ids = keras.Input((None,), dtype="int32")
    h = keras.layers.Embedding(20, 8)(ids)
    h = keras.layers.MultiHeadAttention(2, 4)(h, h)
    h = keras.layers.Conv1D(8, 3, padding="causal")(h)
    h = keras.layers.EinsumDense("btc,cd->btd", (None, 4), bias_axes="d")(h)
    wrapped = pc.wrap(keras.Model(ids, h), "int8_from_float32")
    export(wrapped, tmp_path / "saved")
    x = np.random.default_rng(0).integers(0, 20, (2, 7)).astype(np.int32)
    wanted = array(wrapped(x))
    np.testing.assert_allclose(
        served(tmp_path / "saved", tmp_path, x), wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(BACKEND != "jax", reason="elsewhere the exported program has the kernels")
def test_kernels_after_export(tmp_path):
    """An export leaves a model as it was, also one that fails: JAX goes on to call the kernels."""
    import jax

    wrapped = pc.wrap(model(), "int8_from_float32")
    before = [array(variable) for variable in wrapped.variables]
    export(wrapped, tmp_path / "saved")
    with pytest.raises(ValueError, match="nonsense"):
        wrapped.export(tmp_path / "other", format="nonsense")
    after = [array(variable) for variable in wrapped.variables]
    assert all(map(np.array_equal, before, after))
    program = jax.jit(lambda x: wrapped(x)).lower(X).as_text()
    assert program.count("custom_call @policy_jax_linear") == 2


@pytest.mark.skipif(BACKEND != "jax", reason="elsewhere the exported program has the kernels")
def test_exported_codes(tmp_path):
    """What JAX exports holds int8 codes as they are, once for layers that share them."""
    shared = keras.layers.Dense(8)
    x = keras.Input((8,))
    tied = keras.Model(x, shared(shared(x)))
    wrapped = pc.wrap(tied, "int8_from_float32")
    codes = {tuple(v.shape) for v in wrapped.variables if v.dtype == "int8"}
    export(wrapped, tmp_path / "saved")
    import tensorflow as tf

    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert not codes
    assert [v.shape for v in loaded.variables if v.dtype == tf.int8] == [(8, 8)]
    assert not any(v.dtype == tf.uint8 for v in loaded.variables)


@saved_model
def test_export_archive(tmp_path):
    """`keras.export.ExportArchive` by hand gives the same numbers."""
    wrapped = pc.wrap(model(), "int8_from_float32")
    archive = keras.export.ExportArchive()
    archive.track(wrapped)
    spec = [keras.InputSpec(shape=(None, 8), dtype="float32")]
    archive.add_endpoint(name="serve", fn=wrapped.call, input_signature=spec)
    if KERNELS:
        archive.write_out(tmp_path / "saved", verbose=False)
    else:
        with pytest.warns(UserWarning, match="KERAS_BACKEND=tensorflow"):
            archive.write_out(tmp_path / "saved", verbose=False)
    assert np.array_equal(served(tmp_path / "saved", tmp_path), array(wrapped(X)))


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
