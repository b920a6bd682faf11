"""Run by check_distribution.py: wrapped models under MirroredStrategy on two logical CPU devices."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import policy_core as pc
from policy_core.testing import same_bits

from .distribution_states import same_states, state_of

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 8)).astype(np.float32)
X[13] *= 10  # the second replica's share has the largest value
Y = (X @ RANDOM.standard_normal((8, 3))).astype(np.float32)
pytestmark = pytest.mark.filterwarnings(
    # What Keras says of a model that was compiled before it was wrapped anew.
    "ignore:The model was compiled before:UserWarning"
)


@pytest.fixture(scope="module")
def strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def mlp():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(40, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *layers])


def compiled(policy, strategy, inside=True, optimizer=lambda: keras.optimizers.SGD(0.01)):
    """Gives a model, wrapped inside the scope or after it."""
    with strategy.scope():
        model = mlp()
        if inside:
            pc.wrap(model, policy)
    if not inside:
        pc.wrap(model, policy)
    with strategy.scope():
        model.compile(optimizer(), "mse")
    return model


def alone(policy):
    model = pc.wrap(mlp(), policy)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def fit(model, y=Y, epochs=3):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    return model.fit(X, y, epochs=epochs, **options).history["loss"]


def predict(model, x=X):
    return model.predict(x, batch_size=16, verbose=0)


def replicas_agree(model):
    """Says whether every variable is mirrored, with the same bits on both devices."""
    pairs = [v.value.values for v in model.variables if hasattr(v.value, "values")]
    return len(pairs) == len(model.variables) and all(same_bits(*map(np.array, p)) for p in pairs)


@pytest.mark.parametrize(
    ("mode", "inside"),
    [
        ("int8", True),
        ("int8", False),
        ("int8/weight_only", True),
        ("float8", True),
        ("float8", False),
        ("float8/weight_only", False),
    ],
)
def test_training_is_that_of_one_device(strategy, mode, inside):
    """Two replicas train as one device with the whole batch, float8 state included."""
    policy = f"{mode}_from_float32"
    both, one = compiled(policy, strategy, inside), alone(policy)
    if mode == "int8":
        assert np.array_equal(predict(both), predict(one))
    np.testing.assert_allclose(fit(both), fit(one), rtol=1e-4)
    loss = both.evaluate(X, Y, batch_size=16, verbose=0)
    np.testing.assert_allclose(loss, one.evaluate(X, Y, batch_size=16, verbose=0), rtol=1e-4)
    ours, theirs = state_of(both), state_of(one)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert replicas_agree(both)
    # One row, so a replica without any.
    np.testing.assert_allclose(predict(both, X[:1]), predict(one, X[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float8/dynamic_from_float32"])
def test_training_is_near_that_of_one_device(strategy, policy):
    """Where sums are rounded, or each replica scales its own gradient, losses are near."""
    both, one = compiled(policy, strategy), alone(policy)
    np.testing.assert_allclose(fit(both), fit(one), rtol=0.05)
    assert replicas_agree(both)


def loss_scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)


@pytest.mark.parametrize("policy", ["mixed_float16", "float8_from_mixed_float16"])
def test_loss_scaling(strategy, policy):
    """A step with finite gradients trains; one without them halves the scale and changes no weight."""
    model = compiled(policy, strategy, optimizer=loss_scaled)
    before = state_of(model)["0/weight"]
    fit(model, epochs=1)
    after = state_of(model)["0/weight"]
    assert not same_bits(before, after)
    assert float(model.optimizer.dynamic_scale.numpy()) == 64
    infinite = Y.copy()
    infinite[0] = 1e30
    fit(model, infinite, epochs=1)
    assert same_bits(state_of(model)["0/weight"], after)
    assert float(model.optimizer.dynamic_scale.numpy()) == 32
    assert replicas_agree(model)


def test_float8_keeps_infinities_of_any_replica_out(strategy):
    """The second replica's infinite gradient reaches both through the amax, and the step is skipped."""
    model = compiled("float8_from_mixed_float16", strategy, optimizer=loss_scaled)
    before = state_of(model)["0/weight"]
    infinite = Y.copy()
    infinite[15] = 1e30
    fit(model, infinite, epochs=1)
    assert same_bits(state_of(model)["0/weight"], before)
    assert replicas_agree(model)


@pytest.mark.parametrize("mode", ["int8", "float8"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_files(strategy, tmp_path, mode, inside):
    """What two replicas saved loads, bit-equal, inside the scope, mirrored, and outside of it."""
    policy = f"{mode}_from_float32"
    model = compiled(policy, strategy)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    pc.save(model, tmp_path / "model.safetensors")
    with strategy.scope() if inside else contextlib.nullcontext():
        loaded = keras.models.load_model(tmp_path / "model.keras")
        ours = pc.load(mlp(), tmp_path / "model.safetensors")
        weights = pc.wrap(mlp(), policy)
    weights.load_weights(tmp_path / "model.weights.h5")
    for each in (loaded, ours, weights):
        assert same_states(each, model)
        assert np.array_equal(predict(each), predict(model))
        assert replicas_agree(each) is inside
    if inside:
        np.testing.assert_allclose(fit(loaded, epochs=1), fit(model, epochs=1), rtol=1e-6)
        assert replicas_agree(loaded)
        return
    model.export(tmp_path / "saved", verbose=False)
    saved = tf.saved_model.load(tmp_path / "saved")
    assert np.array_equal(np.asarray(saved.serve(X)), np.asarray(model(X)))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_changes_keep_variables_mirrored(strategy, inside):
    """replace, freeze and unwrap leave every variable on both devices, in the scope and outside."""
    model = compiled("int8_from_float32", strategy)
    with strategy.scope() if inside else contextlib.nullcontext():
        pc.wrap(model, "float8_from_float32", on_wrapped="replace")
        assert replicas_agree(model)
        pc.freeze(model)
        assert replicas_agree(model)
        pc.wrap(model, "bfloat16", on_wrapped="replace")
        assert replicas_agree(model)
        pc.unwrap(model)
        assert replicas_agree(model)
        assert model.layers[0].kernel.dtype == "float32"


def test_layers_of_a_transformer(strategy):
    """An embedding, attention and a layer that is called twice train as on one device."""

    def make():
        keras.utils.set_random_seed(0)
        ids = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(32, 16)(ids)
        x = keras.layers.MultiHeadAttention(2, 8)(x, x)
        twice = keras.layers.Dense(16, name="twice")
        model = pc.wrap(keras.Model(ids, twice(twice(x))), "float8_from_float32")
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        return model

    ids = RANDOM.integers(0, 16, (16, 6)).astype(np.int32)
    one = make()
    with strategy.scope():
        both = make()
    for model in (one, both):
        model.fit(ids, ids, batch_size=16, epochs=2, shuffle=False, verbose=0)
    ours, theirs = state_of(both), state_of(one)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert np.count_nonzero(ours["twice/input_amax_history"]) == 4
    assert replicas_agree(both)
