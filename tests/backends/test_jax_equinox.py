"""equinox: every layer kind under vmap, training with state in and out, partitions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy_core as pc
import policy_jax
from policy_core.testing import same_bits

KEY = jax.random.key(0)


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


LAYERS = {
    "linear": (lambda: eqx.nn.Linear(8, 5, key=KEY), (8,)),
    "mlp": (lambda: eqx.nn.MLP(8, 4, 16, 2, key=KEY), (8,)),
    "conv": (lambda: eqx.nn.Conv2d(3, 5, 3, stride=2, padding=1, key=KEY), (3, 9, 8)),
    "conv-dilated": (lambda: eqx.nn.Conv1d(3, 5, 3, dilation=2, key=KEY), (3, 12)),
}


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only", "float8", "float8/dynamic"])
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_every_layer_kind_is_quantized(make, shape, mode):
    """Each kind of layer with a product computes on codes under vmap, and unwraps."""
    x = inputs(4, *shape)
    wanted = jax.vmap(make())(x)
    model = pc.wrap(make(), f"{mode}_from_float32")
    assert all(row.quantized for row in pc.report(model).rows)
    y = jax.jit(jax.vmap(model))(x)
    assert y.shape == wanted.shape
    assert np.abs(y - wanted).max() <= 0.15 * np.abs(wanted).max()
    plain = pc.unwrap(model)
    assert jax.tree.structure(plain) == jax.tree.structure(make())


def test_attention_is_quantized():
    """The projections of eqx.nn.MultiheadAttention compute on codes."""
    attention = eqx.nn.MultiheadAttention(2, 8, key=KEY)
    x = inputs(6, 8)
    model = pc.wrap(attention, "int8_from_float32")
    rows = pc.report(model).rows
    assert [r.path for r in rows if r.quantized] == [
        "query_proj",
        "key_proj",
        "value_proj",
        "output_proj",
    ]
    wanted = attention(x, x, x)
    assert np.abs(model(x, x, x) - wanted).max() <= 0.1 * np.abs(wanted).max()


def test_module_with_leaves_of_every_kind():
    """Under mixed_bfloat16 only float arrays are cast; ints, keys, None and static fields are not."""

    class Model(eqx.Module):
        scale: jax.Array
        ids: jax.Array
        key: jax.Array
        nothing: None
        linear: eqx.nn.Linear
        name: str = eqx.field(static=True)

        def __call__(self, x):
            assert self.scale.dtype == jnp.bfloat16
            assert self.ids.dtype == jnp.int32
            assert jnp.issubdtype(self.key.dtype, jax.dtypes.prng_key)
            return self.linear(x * self.scale)

    plain = Model(jnp.ones(8), jnp.arange(3), KEY, None, eqx.nn.Linear(8, 4, key=KEY), "model")
    model = pc.wrap(plain, "mixed_bfloat16")
    assert jax.vmap(model)(inputs(2, 8)).dtype == jnp.bfloat16
    assert [row.path for row in pc.report(model).rows] == ["", "linear"]
    floats = [x for x in jax.tree.leaves(model) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert model.name == "model"
    assert jax.tree.structure(pc.unwrap(model)) == jax.tree.structure(plain)


def training_step(model, state, optimizer, x, target):
    def loss(model):
        y, after = policy_jax.with_state(lambda model: jax.vmap(model)(x))(model)
        return jnp.square(y - target).mean(), after

    (value, after), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    after = policy_jax.apply_gradient_state(after, gradients)
    mask = policy_jax.trainable(after)
    updates, state = optimizer.update(eqx.filter(gradients, mask), state, eqx.filter(after, mask))
    return value, eqx.apply_updates(after, updates), state


@pytest.mark.parametrize(
    "policy", ["float8_from_float32", "float8/dynamic_from_float32", "int8_from_float32"]
)
def test_training(policy):
    """A model trains with adam over the documented partition; states move where there are some."""
    layers = [eqx.nn.Linear(8, 8, key=KEY), eqx.nn.LayerNorm(8), eqx.nn.Linear(8, 4, key=KEY)]
    model = pc.wrap(eqx.nn.Sequential(layers), policy)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, policy_jax.trainable(model)))
    step = eqx.filter_jit(training_step)
    x, target = inputs(32, 8), inputs(32, 4, seed=1)
    losses = []
    if policy == "float8_from_float32":
        for _ in range(8):
            value, model, state = step(model, state, optimizer, x, target)
            losses.append(float(value))
        for layer in (model.layers[0], model.layers[2]):
            for role in ("input", "weight", "output_grad"):
                history = layer.tensors[f"{role}_amax_history"]
                assert int((history > 0).sum()) == 8, role
        assert float(model.layers[0].tensors["input_amax_history"][0]) == float(jnp.abs(x).max())
    else:
        # Without a state there is nothing for apply_gradient_state.
        def loss(model):
            return jnp.square(jax.vmap(model)(x) - target).mean()

        for _ in range(8):
            value, gradients = eqx.filter_value_and_grad(loss)(model)
            mask = policy_jax.trainable(model)
            updates, state = optimizer.update(eqx.filter(gradients, mask), state)
            before, model = model, eqx.apply_updates(model, updates)
            losses.append(float(value))
        if policy.startswith("int8"):
            name = "weight"
            assert same_bits(model.layers[0].tensors[name], before.layers[0].tensors[name])
    assert losses[-1] < losses[0]


def test_layer_called_twice_makes_two_entries():
    """Two calls of one layer in a training step make two entries, in order."""
    layer = pc.wrap(eqx.nn.Linear(8, 8, key=KEY), "float8_from_float32")
    x = inputs(8)

    def loss(layer):
        run = policy_jax.with_state(lambda layer: (layer(x) * 3).sum() + (layer(2 * x) * 5).sum())
        return run(layer)

    gradients, after = eqx.filter_grad(loss, has_aux=True)(layer)
    after = policy_jax.apply_gradient_state(after, gradients)
    largest = float(jnp.abs(x).max())
    np.testing.assert_array_equal(
        after.tensors["input_amax_history"][:3], [2 * largest, largest, 0]
    )
    np.testing.assert_array_equal(after.tensors["output_grad_amax_history"][:3], [3, 5, 0])
    assert not layer.tensors["input_amax_history"].any()
    with pytest.raises(ValueError, match="hold no state"):
        policy_jax.apply_gradient_state(jnp.ones(2), jnp.ones(2))


def test_shared_arrays_stay_shared():
    """Two layers with one weight array have one codes array afterwards."""
    a, b = eqx.nn.Linear(8, 8, key=KEY), eqx.nn.Linear(8, 8, key=jax.random.key(1))
    b = eqx.tree_at(lambda layer: layer.weight, b, a.weight)
    model = pc.wrap(eqx.nn.Sequential([a, b]), "int8_from_float32")
    assert model.layers[0].tensors["weight"] is model.layers[1].tensors["weight"]
    plain = pc.unwrap(model)
    assert plain.layers[0].weight is plain.layers[1].weight


def test_what_has_no_float_weight_says_so():
    """A quantized layer's weight attribute is an error that helps; its others are the layer's."""
    model = pc.wrap(eqx.nn.Linear(8, 4, key=KEY), "int8_from_float32")
    assert model.in_features == 8
    with pytest.raises(AttributeError, match=r"pc\.unwrap gives the float layer back"):
        model.weight  # noqa: B018  # the look-up is what is tested
    (row,) = pc.report(pc.wrap(eqx.nn.Linear("scalar", 4, key=KEY), "int8_from_float32")).rows
    assert "scalar" in row.note


def test_layers_inside_weight_norm_are_left_out():
    """A layer whose weight `eqx.nn.WeightNorm` computes at each call keeps it."""
    model = eqx.nn.WeightNorm(eqx.nn.Linear(8, 4, key=jax.random.key(0)))
    x = jnp.ones(8)
    wrapped = pc.wrap(model, "int8_from_float32")
    np.testing.assert_allclose(wrapped(x), model(x), rtol=1e-6)
    notes = {row.path: row.note for row in pc.report(wrapped).rows}
    assert "WeightNorm gives it a weight at each call" in notes["layer"]


@pytest.mark.parametrize("policy", ["int8_from_float32", "mixed_bfloat16"])
def test_layers_inside_shared_stay_tied(policy):
    """Layers that `eqx.nn.Shared` ties are left out of quantization, and stay tied."""

    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            pair = (
                eqx.nn.Embedding(8, 4, key=key),
                eqx.nn.Linear(4, 8, use_bias=False, key=key),
            )
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, index):
            table, head = self.shared()
            return head(table(index))

    model = Tied(jax.random.key(0))
    wrapped = pc.wrap(model, policy)
    np.testing.assert_allclose(
        np.asarray(wrapped(jnp.array(3)), np.float32), model(jnp.array(3)), atol=0.05
    )
    assert not any(row.quantized for row in pc.report(wrapped).rows)


def test_states_may_be_made_of_wrapped_models():
    """`eqx.nn.make_with_state` works around `pc.wrap`."""

    class Net(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.linear = eqx.nn.Linear(8, 4, key=key)
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="ema")

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def make(key):
        return pc.wrap(Net(key), "int8_from_float32")

    model, state = eqx.nn.make_with_state(make)(jax.random.key(0))
    y, _ = eqx.nn.inference_mode(model)(jnp.ones(8), state)
    assert y.shape == (4,)
    assert [row.path for row in pc.report(model).rows] == ["linear", "norm"]
