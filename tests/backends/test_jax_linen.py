"""flax linen: every layer kind, training with the collection "float8", what is refused."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import policy_core as pc
import policy_jax
from policy_core.testing import same_bits


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.LayerNorm()(x)
        return nn.Dense(4)(x)


LAYERS = {
    "dense": (nn.Dense(5), (3, 8)),
    "general": (nn.DenseGeneral((5, 2), axis=(1, -1)), (6, 3, 4)),
    "einsum": (nn.Einsum((4, 5), "...c,cd->...d"), (6, 3, 4)),
    "conv": (nn.Conv(5, (3, 3), strides=2), (2, 9, 8, 4)),
    "attention": (nn.MultiHeadDotProductAttention(num_heads=2), (2, 6, 8)),
    "attention-no-bias": (
        nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False),
        (2, 6, 8),
    ),
    "net": (Net(), (3, 8)),
}


@pytest.mark.parametrize("mode", ["int8", "int8/weight_only", "float8", "float8/dynamic"])
@pytest.mark.parametrize(("module", "shape"), LAYERS.values(), ids=LAYERS)
def test_every_layer_kind_is_quantized(module, shape, mode):
    """Each kind of layer with a product computes on codes, near the float layer, and unwraps."""
    x = inputs(*shape)
    variables = module.init(jax.random.key(0), x)
    wanted = module.apply(variables, x)
    wrapped, quantized = pc.wrap((module, variables), f"{mode}_from_float32")
    norms = ["LayerNorm_0"] if isinstance(module, Net) else []
    rows = pc.report((wrapped, quantized)).rows
    assert [row.path for row in rows if not row.quantized] == norms
    y = jax.jit(wrapped.apply)(quantized, x)
    assert y.shape == wanted.shape
    assert np.abs(y - wanted).max() <= 0.15 * np.abs(wanted).max()
    plain, back = pc.unwrap((wrapped, quantized))
    assert plain is module
    assert jax.tree.structure(back) == jax.tree.structure(variables)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, variables)


def test_embed_and_attend():
    """A quantized table gives its rows, and serves as the last layer's weight."""

    class Tied(nn.Module):
        def setup(self):
            self.table = nn.Embed(10, 8)

        def __call__(self, ids):
            return self.table.attend(self.table(ids))

    ids = jnp.arange(6)
    variables = Tied().init(jax.random.key(0), ids)
    wanted = Tied().apply(variables, ids)
    module, variables = pc.wrap((Tied(), variables), "int8_from_float32")
    assert np.abs(module.apply(variables, ids) - wanted).max() <= 0.05 * np.abs(wanted).max()


def test_training_updates_the_collection():
    """A call that may change "float8" is in training; adam over params alone trains."""
    x, target = inputs(32, 8), inputs(32, 4, seed=1)
    variables = Net().init(jax.random.key(0), x)
    module, variables = pc.wrap((Net(), variables), "float8_from_float32")
    optimizer = optax.adam(1e-2)
    params, float8 = variables["params"], variables["float8"]
    state = optimizer.init(params)

    @jax.jit
    def step(params, float8, state):
        def loss(params, float8):
            own = {"params": params, "float8": float8}
            y, updates = module.apply(own, x, mutable=["float8"])
            return jnp.square(y - target).mean(), updates["float8"]

        (value, after), (gradients, told) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            params, float8
        )
        updates, state = optimizer.update(gradients, state)
        after = policy_jax.apply_gradient_state(after, told)
        return value, optax.apply_updates(params, updates), after, state

    losses = []
    for _ in range(8):
        value, params, float8, state = step(params, float8, state)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    for layer in ("Dense_0", "Dense_1"):
        for role in ("input", "weight", "output_grad"):
            assert int((float8[layer][f"{role}_amax_history"] > 0).sum()) == 8, role
    before = jax.tree.map(np.array, float8)
    module.apply({"params": params, "float8": float8}, x * 100)
    jax.tree.map(np.testing.assert_array_equal, before, float8)


def test_frozen_dict_is_taken():
    """Variables may be frozen; codes are in a collection of their own, params stay floats."""
    x = inputs(3, 8)
    variables = flax.core.freeze(Net().init(jax.random.key(0), x))
    _, quantized = pc.wrap((Net(), variables), "int8_from_float32")
    assert set(quantized) == {"params", "quantized"}
    assert {a.dtype for a in jax.tree.leaves(quantized["params"])} == {jnp.dtype("float32")}


def test_batch_norm_statistics_are_kept():
    """BatchNorm's statistics are its tensors too, and update as linen's do."""
    module = nn.BatchNorm(use_running_average=False)
    variables = module.init(jax.random.key(0), inputs(4, 8))
    wrapped, variables = pc.wrap((module, variables), "mixed_bfloat16")
    y, updates = wrapped.apply(variables, inputs(16, 8) + 3, mutable=["batch_stats"])
    assert y.dtype == jnp.bfloat16
    assert updates["batch_stats"]["mean"].any()


def test_map_by_path():
    """Rules go by linen's own paths."""
    variables = Net().init(jax.random.key(0), inputs(3, 8))
    pair = pc.wrap((Net(), variables), {"Dense_0": "int8_from_float32"})
    assert [r.path for r in pc.report(pair).rows if r.quantized] == ["Dense_0"]
    with pytest.raises(pc.errors.UnmatchedRuleError, match="Dense_0"):
        pc.wrap((Net(), variables), {"Dens_0": "int8_from_float32"})


def test_other_modules_cannot_use_codes_by_mistake():
    """A module with a kernel that it uses in a way of its own is refused at its first call."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.ones, (8, 4))

    variables = Own().init(jax.random.key(0), inputs(3, 8))
    module, variables = pc.wrap((Own(), variables), "int8_from_float32")
    with pytest.raises(TypeError, match="Give this path a float policy"):
        module.apply(variables, inputs(3, 8))


def test_what_is_no_pair_is_refused():
    """A module alone says what is missing; a wrapped one has its variables already."""
    with pytest.raises(TypeError, match=r"pc.wrap\(\(module, variables\), policy\)"):
        pc.wrap(Net(), "int8_from_float32")
    variables = Net().init(jax.random.key(0), inputs(3, 8))
    module, _ = pc.wrap((Net(), variables), "int8_from_float32")
    with pytest.raises(TypeError, match="has its variables already"):
        module.init(jax.random.key(0), inputs(3, 8))
    with pytest.raises(TypeError, match="does not follow policies"):
        module.bind(variables)
    assert "int8_from_float32" in repr(module)


def test_boxed_variables_are_refused():
    """Variables in boxes, as `nn.with_partitioning` makes them, are refused with what to do."""
    dense = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))
    variables = dense.init(jax.random.key(0), inputs(3, 8))
    with pytest.raises(TypeError, match="'params/kernel' is in a box"):
        pc.wrap((dense, variables), "int8_from_float32")
    module, variables = pc.wrap((dense, nn.unbox(variables)), "int8_from_float32")
    assert module.apply(variables, inputs(3, 8)).shape == (3, 4)


@pytest.mark.parametrize("norm", [nn.WeightNorm, nn.SpectralNorm])
def test_layers_inside_norms_of_weights_are_left_out(norm):
    """A layer whose kernel a norm of weights computes at each call keeps it."""
    options = {"update_stats": False} if norm is nn.SpectralNorm else {}

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return norm(nn.Dense(4))(x, **options)

    x = inputs(3, 8)
    plain = Normed()
    variables = plain.init(jax.random.key(0), x)
    module, wrapped = pc.wrap((plain, variables), "int8_from_float32")
    np.testing.assert_allclose(module.apply(wrapped, x), plain.apply(variables, x), rtol=1e-6)
    notes = {row.path: row.note for row in pc.report((module, wrapped)).rows}
    assert "computes its kernel anew" in notes["Dense_0"]


def test_bits_under_jit_are_those_without():
    """An int8 linen model gives the same bits jitted and not."""
    variables = nn.Dense(5).init(jax.random.key(0), inputs(3, 8))
    module, variables = pc.wrap((nn.Dense(5), variables), "int8_from_mixed_bfloat16")
    x = inputs(7, 8)
    assert same_bits(jax.jit(module.apply)(variables, x), module.apply(variables, x))
