"""Wrapped models through Keras's own files, and through ours between frameworks."""

import copy
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras
from policy_core.testing import same_bits

RANDOM = np.random.default_rng(0)
BACKEND = keras.config.backend()
POLICIES = (
    "mixed_bfloat16",
    "int8_from_mixed_bfloat16",
    "int8/weight_only_from_float32",
    "float8_from_float32",
)


def array(tensor):
    return np.asarray(policy_keras.backend.to_numpy(tensor)).astype(np.float32)


@keras.saving.register_keras_serializable("policy_core_tests")
class Block(keras.layers.Layer):
    """A block as users write them: layers from the constructor, and a variable of its own."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.drop = keras.layers.Dropout(0.1)
        self.steps = [keras.layers.Dense(width, activation="gelu"), keras.layers.Dense(width)]
        self.norm = keras.layers.LayerNormalization()

    def build(self, shape):
        self.attention.build(shape, shape)
        for step in self.steps:
            step.build((*shape[:-1], self.width))
        self.norm.build((*shape[:-1], self.width))
        self.gain = self.add_weight(shape=(self.width,), name="gain", initializer="ones")

    def call(self, x, training=None):
        y = x + self.drop(self.attention(x, x), training=training)
        for step in self.steps:
            y = step(y)
        return self.norm(x + y) * self.gain

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def functional():
    ids = keras.Input((5,), dtype="int32", name="ids")
    x = keras.layers.Embedding(20, 8, name="table")(ids)
    x = Block(8, name="block")(x)
    shared = keras.layers.Dense(8)
    x = shared(shared(x))
    x = keras.layers.Conv1D(6, 3, padding="same")(x)
    return keras.Model(ids, keras.layers.Dense(3, name="head")(x))


def sequential():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(20, 8),
            keras.Sequential([Block(8), keras.layers.Dense(4, activation="relu")]),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


@keras.saving.register_keras_serializable("policy_core_tests")
class Written(keras.Model):
    """A model as users write them: without a build method, its config left to Keras."""

    def __init__(self, width=8, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(20, width)
        self.blocks = [Block(width), Block(width)]
        self.head = keras.layers.Dense(3)

    def call(self, ids, training=None):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def written():
    model = Written()
    model(IDS)
    return model


@keras.saving.register_keras_serializable("policy_core_tests")
class Backbone(keras.Model):
    """A functional model that makes its layers from its arguments, as those of keras_hub do."""

    def __init__(self, width=8, **kwargs):
        ids = keras.Input((5,), dtype="int32")
        x = Block(width, name="first")(keras.layers.Embedding(20, width)(ids))
        super().__init__(inputs=ids, outputs=keras.layers.Dense(3)(x), **kwargs)
        self.width = width

    def get_config(self):
        return {"name": self.name, "trainable": self.trainable, "width": self.width}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


IDS = np.arange(15).reshape(3, 5).astype(np.int32)
MODELS = (functional, sequential, written, Backbone)


def state_of(model):
    sites = policy_keras.backend.walk(model)
    read = policy_keras.backend.to_numpy
    return {f"{s.path}/{name}": read(tensor) for s in sites for name, tensor in s.tensors.items()}


def policies_of(model):
    return [(row.path, row.asked, row.policy, row.bytes_before) for row in pc.report(model).rows]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_keras_file_round_trip(make, policy, tmp_path):
    """A saved model loads with the same policies, bits, sizes, and answers."""
    model = pc.wrap(make(), policy)
    wanted = array(model(IDS))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(array(loaded(IDS)), wanted)
    assert policies_of(loaded) == policies_of(model)
    assert loaded.dtype_policy.name == model.dtype_policy.name
    assert pc.wrap(loaded, policy) is loaded
    assert {type(x).__name__ for x in loaded._flatten_layers()} == {
        type(x).__name__ for x in model._flatten_layers()
    }
    pc.unwrap(loaded)
    assert {row.asked for row in pc.report(loaded).rows} == {""}
    assert keras.backend.standardize_dtype(loaded(IDS).dtype) == "float32"
    assert loaded.dtype_policy.name == "float32"


@pytest.mark.parametrize("make", [functional, sequential])
def test_loaded_model_gets_loss_scaling(make, tmp_path):
    """A model under mixed_float16 that was loaded gets a loss scale from compile, as before."""
    pc.wrap(make(), "mixed_float16").save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.compile("sgd", "mse")
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    assert type(pc.unwrap(loaded)) in (keras.Sequential, type(make()))


@pytest.mark.parametrize("make", MODELS)
def test_weights_files(make, tmp_path):
    """Weights of a wrapped model load into another that was wrapped alike."""
    model = pc.wrap(make(), "int8_from_float32")
    wanted = array(model(IDS))
    model.save_weights(tmp_path / "a.weights.h5")
    other = pc.wrap(make(), "int8_from_float32")
    other.load_weights(tmp_path / "a.weights.h5")
    assert np.array_equal(array(other(IDS)), wanted)
    other = pc.wrap(make(), "int8_from_float32")
    other.set_weights(model.get_weights())
    assert np.array_equal(array(other(IDS)), wanted)


@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")  # Keras, then fails
def test_weights_of_another_policy_are_refused(tmp_path):
    """Weights of another mode say what the layer needs."""
    pc.wrap(functional(), {"head": "int8_from_float32"}).save_weights(tmp_path / "a.weights.h5")
    other = pc.wrap(functional(), {"head": "float8_from_float32"})
    with pytest.raises(ValueError, match="Wrap the model as it was"):
        other.load_weights(tmp_path / "a.weights.h5")


@pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_float32"])
def test_float_weights_load_into_a_wrapped_model(policy, tmp_path):
    """A float checkpoint loads into a wrapped model, as if it had been wrapped afterwards."""
    model = functional()
    model.save_weights(tmp_path / "a.weights.h5")
    other = pc.wrap(functional(), policy)
    other.load_weights(tmp_path / "a.weights.h5")
    assert np.array_equal(array(other(IDS)), array(pc.wrap(model, policy)(IDS)))


def test_weights_hold_plain_codes(tmp_path):
    """A weights file has plain codes and scales under plain names, not a kernel's layout."""
    import h5py

    model = pc.wrap(functional(), {"head": "int8_from_float32"})
    model.save_weights(tmp_path / "a.weights.h5")
    with h5py.File(tmp_path / "a.weights.h5") as file:
        groups = [layer["vars"] for layer in file["layers"].values()]
        (found,) = [group for group in groups if "weight_scale" in group]
        arrays = {name: dataset[()] for name, dataset in found.items()}
    assert arrays["weight"].shape == (3, 6)
    assert arrays["weight"].dtype == np.int8
    assert arrays["weight_scale"].shape == (3, 1)
    assert arrays["version"] == 1


@pytest.mark.parametrize("make", MODELS)
def test_copies(make):
    """Copies, pickles and clones compute the same."""
    model = pc.wrap(make(), "int8_from_mixed_bfloat16")
    wanted = array(model(IDS))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(array(other(IDS)), wanted)
    if make is functional:
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        assert np.array_equal(array(clone(IDS)), wanted)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_and_trained_state_round_trips(frozen, tmp_path):
    """float8 state that training has moved is in Keras's file, and in a frozen one too."""
    model = pc.wrap(functional(), "float8_from_float32")
    model(IDS, training=True)
    model(IDS, training=True)
    model = pc.freeze(model) if frozen else model
    wanted = array(model(IDS))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ours, theirs = state_of(model), state_of(loaded)
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    assert np.array_equal(array(loaded(IDS)), wanted)


@pytest.mark.parametrize("policy", ["int8_from_float32", "float8_from_mixed_bfloat16"])
def test_optimizer_of_a_subclassed_model(policy, tmp_path):
    """A model that makes its layers anew is compiled for what they become, and trains on."""
    model = pc.wrap(written(), policy)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(IDS, IDS % 3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    pairs = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
    assert all(same_bits(*map(policy_keras.backend.to_numpy, pair)) for pair in pairs)
    loaded.fit(IDS, IDS % 3, verbose=0)


@pytest.mark.parametrize("make", MODELS)
def test_our_files(make, tmp_path):
    """`pc.save` and `pc.load` take a fresh float model, whatever names Keras has made up in it."""
    model = pc.wrap(make(), {".*": "int8_from_float32"})
    wanted = array(model(IDS))
    pc.save(model, tmp_path / "m.safetensors")
    loaded = pc.load(make(), tmp_path / "m.safetensors")
    assert np.array_equal(array(loaded(IDS)), wanted)


@keras.saving.register_keras_serializable("policy_core_tests")
class CollectingAttention(keras.layers.MultiHeadAttention):
    """Keras's documented way to keep the policies of quantized layers inside."""

    def get_config(self):
        config = super().get_config()
        policies = keras.dtype_policies.DTypePolicyMap()
        for layer in self._flatten_layers():
            if layer.quantization_mode is not None:
                policies[layer.path] = layer.dtype_policy
        if len(policies) > 0:
            config["dtype"] = policies
        return config


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_documented_attention(policy, tmp_path):
    """The subclass from Keras's documentation is quantized, saved and loaded: same answers."""
    x = keras.Input((5, 8))
    model = keras.Model(x, CollectingAttention(2, 4)(x, x))
    pc.wrap(model, policy)
    data = RANDOM.standard_normal((3, 5, 8)).astype(np.float32)
    wanted = array(model(data))
    model.save(tmp_path / "model.keras")
    model.save(tmp_path / "again.keras")  # Keras changes the policies that it serializes
    loaded = keras.models.load_model(tmp_path / "again.keras")
    assert np.array_equal(array(loaded(data)), wanted)
    assert policies_of(loaded) == policies_of(model)


def test_layer_that_was_wrapped_alone(tmp_path):
    """A layer wrapped alone inside a custom one loads by weights, or after the model is wrapped."""
    model = sequential()
    block = model.layers[1].layers[0]
    pc.wrap(block.steps[0], "int8_from_float32")
    wanted = array(model(IDS))
    model.save(tmp_path / "alone.keras")
    # The block is plain, and makes plain layers: no one tells them otherwise.
    with pytest.raises(ValueError, match="expected 2 variables, but received 4"):
        keras.models.load_model(tmp_path / "alone.keras")
    other = sequential()
    pc.wrap(other.layers[1].layers[0].steps[0], "int8_from_float32")
    other.load_weights(tmp_path / "alone.keras")
    assert np.array_equal(array(other(IDS)), wanted)
    pc.wrap(model, "float32", on_wrapped="keep")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(array(loaded(IDS)), wanted)
    assert policies_of(loaded) == policies_of(model)


def test_attention_whose_dtype_is_a_map(tmp_path):
    """A layer that got a map of Keras's as its dtype is wrapped, saved and loaded, and keeps it."""
    x = keras.Input((5, 8))
    dtype = keras.dtype_policies.DTypePolicyMap(
        "float32", {".*/query": keras.DTypePolicy("bfloat16")}
    )
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, dtype=dtype)(x, x))
    pc.wrap(model, "int8_from_float32")
    data = RANDOM.standard_normal((3, 5, 8)).astype(np.float32)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(array(loaded(data)), array(model(data)))
    assert policies_of(loaded) == policies_of(model)
    for each in (model, loaded):
        attention = pc.unwrap(each).layers[-1]
        assert attention.dtype_policy["a/query"].name == "bfloat16"
        assert attention.query_dense.variable_dtype == "bfloat16"


def test_missing_import_is_told(tmp_path):
    """Without policy_keras, loading says what is not known, by a name that leads here."""
    model = pc.wrap(sequential(), "int8_from_float32")
    model.save(tmp_path / "model.keras")
    code = f"import keras; keras.models.load_model({str(tmp_path / 'model.keras')!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode
    assert "policy_keras" in ran.stderr


def test_newer_files_are_refused():
    """A config of a newer version is refused with what to do."""
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    config = pc.wrap(layer, "int8_from_float32").get_config()
    config["policy_core"]["version"] = 99
    with pytest.raises(ValueError, match="Install a newer one"):
        type(layer).from_config(config)
