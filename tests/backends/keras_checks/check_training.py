"""compile, fit, evaluate and predict with wrapped models; float8 state through Keras's trainers."""

import contextlib

import keras
import numpy as np
import pytest

import policy_core as pc
import policy_keras
import policy_numpy
from policy_core.testing import same_bits

RANDOM = np.random.default_rng(0)
BACKEND = keras.config.backend()
MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
X = RANDOM.standard_normal((32, 8)).astype(np.float32)
Y = (X @ RANDOM.standard_normal((8, 3))).astype(np.float32)


def array(tensor):
    return np.asarray(policy_keras.backend.to_numpy(tensor)).astype(np.float32)


def mlp():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="gelu"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3),
        ]
    )


def compiled(policy, optimizer=None, **options):
    model = pc.wrap(mlp(), policy)
    model.compile(optimizer or keras.optimizers.SGD(0.01), "mse", **options)
    return model


def state_of(model):
    sites = policy_keras.backend.walk(model)
    read = policy_keras.backend.to_numpy
    return {
        f"{s.path}/{name}": np.array(read(tensor))
        for s in sites
        for name, tensor in s.tensors.items()
    }


@pytest.mark.parametrize(
    ("mode", "source"), list(zip(MODES, ("float32", "mixed_bfloat16") * 3, strict=False))
)
def test_fit_evaluate_predict(mode, source):
    """Every mode trains what it can train, and answers the same from predict and a call."""
    model = compiled(f"{mode}_from_{source}")
    before = state_of(model)
    first = model.evaluate(X, Y, verbose=0)
    assert (
        np.array_equal(
            model.predict(X, verbose=0), np.asarray(policy_keras.backend.to_numpy(model(X)))
        )
        or BACKEND == "jax"
    )
    assert all(same_bits(before[name], array) for name, array in state_of(model).items())
    model.fit(X, Y, epochs=3, batch_size=8, verbose=0)
    assert model.evaluate(X, Y, verbose=0) < first
    after = state_of(model)
    trains = mode in ("float8", "float8/dynamic")
    assert same_bits(before["0/weight"], after["0/weight"]) is not trains
    assert not same_bits(before["0/bias"], after["0/bias"])


@pytest.mark.parametrize("jit", [False, True])
def test_float8_state_moves_through_fit(jit):
    """Four steps of fit leave four entries in each history, newest first, and scales from them."""
    if jit and BACKEND == "torch":
        pytest.skip("torch.compile of Keras's train step is not asked for by Keras itself")
    model = compiled("float8_from_float32", jit_compile=jit)
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    state = state_of(model)
    for role in ("input", "weight", "output_grad"):
        history = state[f"0/{role}_amax_history"]
        assert (history[:4] > 0).all(), role
        assert not history[4:].any(), role
    largest = [np.abs(X[i : i + 8]).max() for i in (24, 16, 8, 0)]
    assert np.array_equal(state["0/input_amax_history"][:4], np.float32(largest))
    wanted = np.float32(state["0/input_amax_history"][1:4].max()) / np.float32(448)
    assert state["0/input_scale"] == wanted
    before = state_of(model)
    model.evaluate(X * 100, Y, verbose=0)
    model.predict(X * 100, verbose=0)
    assert all(same_bits(before[name], array) for name, array in state_of(model).items())


def test_train_on_batch():
    """Batches one by one, with evaluation between them, move float8 state once each."""
    model = compiled("float8_from_float32")
    for _ in range(2):
        model.train_on_batch(X[:8], Y[:8])
        model.test_on_batch(X[:8], Y[:8])
        model.predict_on_batch(X[:8])
    state = state_of(model)
    for role in ("input", "weight", "output_grad"):
        assert np.count_nonzero(state[f"0/{role}_amax_history"]) == 2, role


def test_float8_step_is_the_reference():
    """One step of SGD on one layer moves weight, bias and state as the numpy reference says."""
    layer = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((8,)), layer])
    kernel, bias = layer.get_weights()
    reference = policy_numpy.Dense(8, 3)
    reference.tensors.update(weight=kernel.T.copy(), bias=bias.copy())
    pc.wrap(reference, "float8_from_float32")
    pc.wrap(model, "float8_from_float32")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    for step in range(3):
        x, y = X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
        model.fit(x, y, batch_size=8, verbose=0)
        plan = reference.wrapping.plan
        out, operands, moved = policy_numpy._layers.linear(x, reference.tensors, plan, True)
        reference.tensors.update(moved)
        dy = 2 * (out - y) / y.size
        _, gradients, moved = policy_numpy._layers.linear_gradient(
            dy, operands, reference.tensors, plan
        )
        reference.tensors.update(moved)
        for name, gradient in gradients.items():
            reference.tensors[name] = reference.tensors[name] - np.float32(0.1) * gradient
        state = state_of(model)
        for name, wanted in reference.tensors.items():
            # Sums of the loss and of the bias's gradient may be formed in another order.
            np.testing.assert_allclose(state[f"0/{name}"], wanted, rtol=2e-5, atol=1e-6)


def test_float8_trains_as_well_as_float32():
    """After the same steps the loss is within a tenth of float32's."""
    losses = {}
    for policy in ("float32", "float8_from_float32", "float8/dynamic_from_float32"):
        model = compiled(policy, keras.optimizers.Adam(0.01))
        model.fit(X, Y, epochs=15, batch_size=8, verbose=0, shuffle=False)
        losses[policy] = model.evaluate(X, Y, verbose=0)
    assert max(losses.values()) < 1.1 * losses["float32"] + 0.05


def test_layer_that_is_called_twice():
    """A layer that is called twice in a step makes two entries in each history."""
    x = keras.Input((8,))
    layer = keras.layers.Dense(8)
    model = keras.Model(x, layer(layer(x)))
    pc.wrap(model, "float8_from_float32")
    model.compile("sgd", "mse")
    model.fit(X, X, batch_size=32, verbose=0)
    state = state_of(model)
    for role in ("input", "weight", "output_grad"):
        history = state[f"0/{role}_amax_history"]
        assert np.count_nonzero(history) == 2, role


class Branches(keras.Model):
    def __init__(self):
        super().__init__()
        self.used, self.idle = keras.layers.Dense(3), keras.layers.Dense(3)

    def build(self, shape):
        self.used.build(shape)
        self.idle.build(shape)

    def call(self, x, training=None):
        return self.used(x, training=training)


class Cell(keras.layers.Layer):
    """A recurrent cell of linear layers."""

    state_size = 4

    def __init__(self):
        super().__init__()
        self.inward, self.onward = keras.layers.Dense(4), keras.layers.Dense(4)

    def build(self, shape):
        self.inward.build(shape)
        self.onward.build((None, 4))

    def call(self, x, states, training=None):
        h = self.inward(x, training=training) + self.onward(states[0], training=training)
        return keras.ops.tanh(h), [h]


@pytest.mark.parametrize("mode", ["float8", "float8/dynamic", "int8"])
def test_layers_of_a_recurrent_cell(mode):
    """A layer in a cell trains at each time step; on JAX delayed state cannot leave that loop."""
    model = keras.Sequential([keras.Input((3, 8)), keras.layers.RNN(Cell())])
    pc.wrap(model, f"{mode}_from_float32")
    model.compile("sgd", "mse")
    x = X[:24].reshape(8, 3, 8)
    if mode == "float8" and BACKEND == "jax":
        model.predict(x, verbose=0)
        return
    model.fit(x, x[:, 0, :4], batch_size=8, verbose=0)
    if mode == "float8":
        history = state_of(model)["0/cell/inward/output_grad_amax_history"]
        assert np.count_nonzero(history) == 3


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")  # the point of the test
def test_unused_branch_keeps_its_state():
    """A layer that takes no part in ten steps keeps its histories and scales."""
    model = Branches()
    model.build((None, 8))
    pc.wrap(model, "float8_from_float32")
    model.idle(X, training=True)
    before = state_of(model)
    model.compile("sgd", "mse")
    model.fit(X, Y, epochs=10, batch_size=32, verbose=0)
    after = state_of(model)
    for name in before:
        if name.startswith("idle/") and ("amax" in name or "scale" in name):
            assert same_bits(before[name], after[name]), name
    assert np.count_nonzero(after["used/output_grad_amax_history"]) == 10


def test_training_state_is_restored(tmp_path):
    """A model saved between two epochs goes on as if it had not been."""
    model = compiled("float8_from_float32", keras.optimizers.Adam(0.01))
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    ours, theirs = state_of(model), state_of(loaded)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=1e-5, atol=1e-7)


def test_mixed_float16_scales_the_loss():
    """compile gives a mixed_float16 model a loss scale, that skips a step with infinite gradients."""
    model = compiled("mixed_float16")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    before = state_of(model)
    model.fit(X, Y + 1e5, batch_size=32, verbose=0)
    assert float(array(model.optimizer.dynamic_scale)) == model.optimizer.initial_scale / 2
    assert all(same_bits(before[name], array) for name, array in state_of(model).items())
    model.fit(X, Y, epochs=3, batch_size=32, verbose=0)
    assert all(np.isfinite(array).all() for array in state_of(model).values())


def test_loss_scale_is_restored(tmp_path):
    """A saved model has its policy and its loss scale when it is loaded, and goes on with them."""
    model = compiled("float8/dynamic_from_mixed_float16")
    model.fit(X, Y + 1e5, batch_size=32, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.dtype_policy.name == "mixed_float16"
    scale = float(array(loaded.optimizer.dynamic_scale))
    assert scale == loaded.optimizer.initial_scale / 2
    loaded.fit(X, Y, batch_size=32, verbose=0)
    assert type(pc.unwrap(pc.wrap(mlp(), "mixed_float16"))) is keras.Sequential


def test_float8_in_float16_scales_the_loss_too():
    """A quantized policy over mixed_float16 gets a loss scale as well."""
    model = compiled("float8/dynamic_from_mixed_float16")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.fit(X, Y, epochs=2, batch_size=32, verbose=0)
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def test_wrapping_a_compiled_model_warns():
    """A model that was compiled before it was wrapped is told to compile again."""
    model = mlp()
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    with pytest.warns(UserWarning, match=r"Call model.compile again"):
        pc.wrap(model, "float8_from_float32")
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


def test_wrapped_function_is_traced_anew():
    """predict after wrap uses the wrapped layers, although it was traced before."""
    model = mlp()
    before = model.predict(X, verbose=0)
    pc.wrap(model, "int8_from_float32")
    after = model.predict(X, verbose=0)
    assert not np.array_equal(before, after)
    np.testing.assert_allclose(after, array(model(X)), rtol=1e-5, atol=1e-6)


def test_frozen_model_keeps_answers_after_training():
    """freeze after fit gives the answers of evaluation, and keeps only codes."""
    model = compiled("float8_from_float32")
    model.fit(X, Y, batch_size=8, verbose=0)
    wanted = array(model(X))
    with pytest.warns(UserWarning, match=r"Call model.compile again"):
        pc.freeze(model)
    assert np.array_equal(array(model(X)), wanted)
    assert not any("kernel" in v.path for v in model.layers[0].variables)


def test_gradient_accumulation():
    """With gradient accumulation the state stays finite, and scales positive."""
    model = compiled(
        "float8_from_float32", keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    )
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    state = state_of(model)
    assert all(np.isfinite(array).all() for array in state.values())
    assert all(state[name] > 0 for name in state if name.endswith(("put_scale", "grad_scale")))


@pytest.mark.parametrize("jit", [False, True])
def test_int8_under_jit_compile(jit):
    """jit_compile changes no bit of an int8 model's answers."""
    if BACKEND == "torch" and jit:
        pytest.skip("covered by policy_torch's own tests of torch.compile")
    layer = keras.layers.Dense(5)
    model = keras.Sequential([keras.Input((8,)), layer])
    pc.wrap(model, "int8_from_float32")
    wanted = array(model(X))
    model.compile(jit_compile=jit)
    assert np.array_equal(model.predict(X, verbose=0), wanted)


# On PyTorch what is computed again draws new noise, averages once more, and finds the scale that the
# last call of the layer has left.
PURE = BACKEND == "torch"
CALLS = 1 if PURE else 2


class Repeated(keras.layers.Layer):
    """A layer that calls another one several times, each time with noise after it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = keras.layers.Dense(8, activation="gelu")
        self.noise = keras.layers.Dropout(0.0 if PURE else 0.1, seed=1)

    def build(self, shape):
        self.inside.build(shape)

    def call(self, x, training=None):
        for _ in range(CALLS):
            x = self.noise(self.inside(x, training=training), training=training)
        return x


def trained(scope, whole, policy, regularizer=None):
    """Gives what a model is after two steps, of which the scope makes all or the layers alone."""
    keras.utils.set_random_seed(0)
    with scope:
        norm = keras.layers.LayerNormalization() if PURE else keras.layers.BatchNormalization()
        layers = [Repeated(), norm, keras.layers.Dense(3, activity_regularizer=regularizer)]
        model = keras.Sequential([keras.Input((8,)), *layers]) if whole else None
    model = model or keras.Sequential([keras.Input((8,)), *layers])
    pc.wrap(model, policy)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
    return state_of(model)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras's own layers fail under RematScope")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("policy", ["float8_from_float32", "int8_from_float32"])
def test_rematerialization(policy, whole):
    """Under RematScope a model trains as without it: weights, float8 state, averages and noise."""
    wanted = trained(contextlib.nullcontext(), whole, policy)
    found = trained(keras.RematScope(mode="full"), whole, policy)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    if policy.startswith("float8"):
        assert np.count_nonzero(found["0/inside/output_grad_amax_history"]) == 2 * CALLS


@pytest.mark.skipif(BACKEND != "jax", reason="JAX alone traces the scope's calls by themselves")
def test_losses_inside_rematerialization_are_refused():
    """A loss that a layer adds inside a call under RematScope is an error, and not lost."""
    policy, regularizer = "int8_from_float32", keras.regularizers.L2(0.1)
    with pytest.raises((ValueError, RuntimeError), match="adds a loss"):
        trained(keras.RematScope(mode="full"), True, policy, regularizer)
    trained(keras.RematScope(mode="full"), False, policy, regularizer)
