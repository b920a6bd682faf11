"""Run by check_distribution.py with 8 virtual CPU devices: `keras.distribution` over wrapped models."""

import contextlib

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from keras import distribution

import policy_core as pc
import policy_jax

from .distribution_states import same_states, state_of

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 64)).astype(np.float32)
X[13] *= 10  # the largest value is in one device's share
Y = (X @ RANDOM.standard_normal((64, 4))).astype(np.float32)
MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
KERNELS = not policy_jax.register()
pytestmark = pytest.mark.filterwarnings(
    # What Keras says of a model that was compiled before it was wrapped anew.
    "ignore:The model was compiled before:UserWarning"
)


def over(which):
    """Gives the scope of a distribution: none, of the batch, or of the batch and some weights."""
    if which == "none":
        return contextlib.nullcontext()
    if which == "data":
        return distribution.DataParallel().scope()
    layouts = distribution.LayoutMap(distribution.DeviceMesh((2, 4), ["batch", "model"]))
    layouts[".*up/kernel"] = (None, "model")
    layouts[".*up/bias"] = ("model",)
    layouts[".*down/kernel"] = ("model", None)
    layouts[".*(query|key|value)/kernel"] = (None, "model", None)
    layouts[".*attention_output/kernel"] = ("model", None, None)
    layouts[".*table/embeddings"] = ("model", None)
    return distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope()


def mlp():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu", name="up"),
            keras.layers.Dense(64, name="down"),
            keras.layers.Dense(4, name="out"),
        ]
    )


def fit(model, epochs=2):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, epochs=epochs, **options).history["loss"]


def trained(policy):
    model = pc.wrap(mlp(), policy)
    model.compile(keras.optimizers.SGD(0.001), "mse")
    return model, fit(model)


def predict(model):
    return model.predict(X, batch_size=16, verbose=0)


def layouts_of(model):
    """Gives how variables are spread, by the last two parts of their paths."""
    found = {}
    for variable in model.variables:
        sharding = variable.value.sharding
        assert isinstance(sharding, NamedSharding), variable.path
        spec = (*sharding.spec, *(None,) * (len(variable.shape) - len(sharding.spec)))
        found["/".join(variable.path.split("/")[-2:])] = spec
    return found


def kernels_of(model):
    return {row.path: row.kernel for row in pc.report(model).rows}


def assert_near(model, other):
    ours, theirs = state_of(model), state_of(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        value, wanted = ours[name].astype(np.float32), theirs[name].astype(np.float32)
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("which", ["data", "model"])
@pytest.mark.parametrize("mode", MODES)
def test_products_are_those_of_one_device(mode, which):
    """Answers are one device's, in int8 to the bit, and no device gathers the batch or a weight."""
    policy = f"{mode}_from_float32"
    wanted = predict(pc.wrap(mlp(), policy))
    with over(which):
        model = pc.wrap(mlp(), policy)
        found = predict(model)
        x = jax.device_put(X, distribution.distribution().get_data_layout(X.shape).backend_layout)
        variables = [
            [v.value for v in each]
            for each in (model.trainable_variables, model.non_trainable_variables)
        ]
        call = jax.jit(lambda trained, others, x: model.stateless_call(trained, others, x)[0])
        text = call.lower(*variables, x).compile().as_text()
        y = call(*variables, x)
    if mode == "int8":
        assert np.array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    assert "all-gather" not in text
    assert y.sharding.spec[0] == "batch"
    native = {path: not kernel.endswith("_xla") for path, kernel in kernels_of(model).items()}
    # Sums of which each device has a part are XLA's own.
    assert native == {"up": KERNELS, "down": KERNELS and which == "data", "out": KERNELS}
    notes = [row.note for row in pc.report(model).rows]
    assert ("each device has a part of each sum" in notes[1]) is (which == "model")
    assert ("policy_jax_linear" in text) is KERNELS


def test_codes_lie_as_the_kernel_lay():
    """Codes and scales follow the kernel's layout, packed or not; unwrap restores it."""
    plain = {
        "up/kernel": (None, "model"),
        "down/kernel": ("model", None),
        "out/kernel": (None,) * 2,
    }
    with over("model"):
        model = mlp()
    # Outside of the scope: what is there says where the new goes.
    for policy in ("int8_from_float32", "float8/weight_only_from_mixed_bfloat16"):
        pc.wrap(model, policy, on_wrapped="replace")
        found = layouts_of(model)
        packed = "weight_packed" if KERNELS else "weight_codes"
        assert found[f"up/{packed}"] == ("model", None)
        assert found["up/weight_scale"] == ("model", None)
        assert found["up/bias"] == ("model",)
        assert found["down/weight_codes"] == (None, "model")
        assert found["down/weight_scale"] == (None, None)
        assert found[f"out/{packed}"] == (None, None)
    pc.wrap(model, "float8_from_float32", on_wrapped="replace")
    found = layouts_of(model)
    assert all(found[name] == plain[name] for name in plain)
    assert found["up/output_grad_state"] == found["up/input_amax_history"] == (None,)
    pc.freeze(model)
    assert layouts_of(model)[f"up/{packed}"] == ("model", None)
    pc.unwrap(model)
    found = layouts_of(model)
    assert all(found[name] == plain[name] for name in plain)
    with over("model"):
        pc.wrap(model, "float8/dynamic_from_float32")
        model.compile("sgd", "mse")
        assert np.isfinite(fit(model, epochs=1)).all()


@pytest.mark.parametrize("which", ["data", "model"])
@pytest.mark.parametrize("mode", ["int8", "float8", "float8/dynamic"])
def test_training_is_that_of_one_device(mode, which):
    """fit gives one device's losses, weights and float8 state: an amax is that of the whole batch."""
    policy = f"{mode}_from_float32"
    one, wanted = trained(policy)
    with over(which):
        model, losses = trained(policy)
        evaluated = model.evaluate(X, Y, batch_size=16, verbose=0)
        text = step_of(model) if which == "data" else ""
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    expected = one.evaluate(X, Y, batch_size=16, verbose=0)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-4)
    assert_near(model, one)
    assert "all-gather" not in text


def step_of(model):
    """Gives the compiled text of a training step over a spread batch."""
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    layout = distribution.distribution().get_data_layout
    data = [jax.device_put(a, layout(a.shape).backend_layout) for a in (X, Y)]
    return jax.jit(model.train_step).lower(state, data).compile().as_text()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_float_policies_train(policy):
    """Float policies train near to one device; float16 gets its loss scale."""
    _, wanted = trained(policy)
    with over("data"):
        model, losses = trained(policy)
    np.testing.assert_allclose(losses, wanted, rtol=0.05)
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled is (policy == "mixed_float16")


@pytest.mark.parametrize(
    ("mode", "saved", "loaded"),
    [("int8", "model", "none"), ("int8", "data", "model"), ("float8", "none", "model")],
)
def test_files(tmp_path, mode, saved, loaded):
    """What was saved over some devices loads over others: the same bits, laid out as there."""
    policy = f"{mode}_from_float32"
    with over(saved):
        model, _ = trained(policy)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        pc.save(model, tmp_path / "model.safetensors")
        wanted = predict(model)
    with over(loaded):
        again = keras.models.load_model(tmp_path / "model.keras")
        ours = pc.load(mlp(), tmp_path / "model.safetensors")
        weights = pc.wrap(mlp(), policy)
        weights.load_weights(tmp_path / "model.weights.h5")
        for each in (again, ours, weights):
            assert same_states(each, model)
            np.testing.assert_allclose(predict(each), wanted, rtol=1e-5, atol=1e-5)
            if loaded == "model":
                found = layouts_of(each)
                name = "kernel" if mode == "float8" else "weight_codes"
                assert "model" in found[f"down/{name}"]
        assert np.isfinite(fit(again, epochs=1)).all()


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_layers_of_a_transformer(mode):
    """An embedding, attention and a layer that is called twice train as on one device."""

    def make():
        keras.utils.set_random_seed(0)
        ids = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(32, 16, name="table")(ids)
        x = keras.layers.MultiHeadAttention(4, 8, name="attention")(x, x)
        twice = keras.layers.Dense(16, name="twice")
        model = pc.wrap(keras.Model(ids, twice(twice(x))), f"{mode}_from_float32")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        ids = np.random.default_rng(1).integers(0, 16, (16, 6)).astype(np.int32)
        model.fit(ids, ids, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model

    one = make()
    with over("model"):
        model = make()
    assert_near(model, one)
    found = layouts_of(model)
    if mode == "int8":
        assert found["table/weight_codes"] == found["table/weight_scale"] == ("model", None)
        assert found["query/weight_codes"] == found["query/weight_scale"] == ("model", None)
        assert found["attention_output/weight_codes"] == (None, "model")
    else:
        assert np.count_nonzero(state_of(model)["twice/output_grad_amax_history"]) == 4


def test_layouts_set_by_hand():
    """A kernel that was spread without `keras.distribution` takes its codes with it."""
    mesh = jax.make_mesh((8,), ("n",), axis_types=(jax.sharding.AxisType.Auto,))
    model = mlp()
    wanted = predict(pc.wrap(mlp(), "int8_from_float32"))
    for variable in model.variables:
        last = P(*(None,) * (len(variable.shape) - 1), "n") if "up" in variable.path else P()
        variable._value = jax.device_put(variable.value, NamedSharding(mesh, last))
    pc.wrap(model, "int8_from_float32")
    found = layouts_of(model)
    assert found["up/weight_packed" if KERNELS else "up/weight_codes"] == ("n", None)
    assert np.array_equal(np.asarray(model(X)), wanted)
