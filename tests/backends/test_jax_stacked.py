"""Layers that scan and vmap stack: left out with a reason, or wrapped one by one and stacked."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import policy_core as pc
import policy_jax

POLICIES = ("int8_from_float32", "float8_from_float32", "int8/weight_only_from_float32")


def inputs(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def left_out(model):
    (row,) = pc.report(model).rows
    assert not row.quantized
    return row.note


def test_stacked_nnx_layers_follow_the_source_policy():
    """Layers that nnx.vmap made are one row, say why, and compute under nnx.scan and nnx.vmap."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(8, 8, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def chain(x, layer):
        return layer(x)

    model = make(jax.random.split(jax.random.key(0), 3))
    x = inputs(2, 8)
    wanted = chain(x, model)
    pc.wrap(model, "int8_from_float32")
    assert "(3, 8, 8), not 2 axes" in left_out(model)
    np.testing.assert_array_equal(chain(x, model), wanted)
    side_by_side = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(model, x)
    assert side_by_side.shape == (3, 2, 8)


@pytest.mark.parametrize("kind", ["Linear", "Embedding", "Conv1d"])
def test_stacked_equinox_layers_follow_the_source_policy(kind):
    """Layers that filter_vmap made say why they are left out, and compute."""
    sizes = (8, 8, 3) if kind == "Conv1d" else (8, 8)
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.filter_vmap(lambda key: getattr(eqx.nn, kind)(*sizes, key=key))(keys)
    model = pc.wrap(model, "int8_from_float32")
    assert "layers that vmap or scan stacked" in left_out(model)
    x = {"Linear": inputs(8), "Embedding": jnp.int32(3), "Conv1d": inputs(8, 5)}[kind]
    run = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
    assert run(model, x).shape[:2] == (3, 8)


class Body(linen.Module):
    """One layer of a scan, as linen takes it."""

    @linen.compact
    def __call__(self, x, _):
        return linen.Dense(8, name="dense")(x), None


class Scanned(linen.Module):
    """Layers that linen scans over."""

    length: int

    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return linen.scan(Body, length=self.length, **axes)(name="layers")(x, None)[0]


class Mapped(linen.Module):
    """Layers side by side, by linen's vmap."""

    @linen.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        dense = linen.vmap(linen.Dense, in_axes=None, axis_size=3, **axes)
        return dense(8, name="layers")(x)


@pytest.mark.parametrize("module", [Scanned(3), Mapped()], ids=["scan", "vmap"])
def test_stacked_linen_layers_follow_the_source_policy(module):
    """Parameters with an axis of layers are left out, and the module computes as before."""
    x = inputs(2, 8)
    variables = module.init(jax.random.key(0), x)
    wrapped, small = pc.wrap((module, variables), "int8_from_float32")
    assert "nn.scan or nn.vmap" in left_out((wrapped, small))
    np.testing.assert_array_equal(wrapped.apply(small, x), module.apply(variables, x))


def test_stacked_linen_layers_that_look_like_one_are_refused():
    """With as many layers as inputs the shapes fit one layer too; the call tells what is wrong."""
    module, x = Scanned(8), inputs(2, 8)
    pair = pc.wrap((module, module.init(jax.random.key(0), x)), "int8_from_float32")
    with pytest.raises(TypeError, match=r"layers/dense.*nn\.scan and nn\.vmap"):
        pair[0].apply(pair[1], x)


@pytest.mark.parametrize("policy", POLICIES)
def test_wrapped_nnx_layers_can_be_stacked(policy):
    """Layers that were wrapped one by one compute stacked, under scan and vmap."""
    layers = [pc.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(i)), policy) for i in range(3)]
    for layer in layers:
        layer.eval()
    graphs, states = zip(*[nnx.split(layer) for layer in layers], strict=True)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    x = inputs(2, 8)

    def body(x, state):
        return nnx.merge(graphs[0], state)(x), None

    wanted = layers[2](layers[1](layers[0](x)))
    y = jax.jit(lambda x, stacked: jax.lax.scan(body, x, stacked)[0])(x, stacked)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    each = jax.vmap(lambda state: nnx.merge(graphs[0], state)(x))(stacked)
    wanted = jnp.stack([layer(x) for layer in layers])
    np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_wrapped_equinox_layers_can_be_stacked(policy):
    """Wrapped equinox layers stack as pytrees, and compute under scan and filter_vmap."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [pc.wrap(eqx.nn.Linear(8, 8, key=key), policy) for key in keys]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x = inputs(8)
    wanted = layers[2](layers[1](layers[0](x)))
    y = jax.jit(lambda x, s: jax.lax.scan(lambda x, layer: (layer(x), None), x, s)[0])(x, stacked)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    each = eqx.filter_vmap(lambda layer: layer(x))(stacked)
    np.testing.assert_allclose(each[1], layers[1](x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_go_through_stacked_weights(policy):
    """A scan over stacked quantized arrays has the gradient of the loop over them."""
    weights = [policy_jax.quantize_array(inputs(8, 8, seed=s), policy) for s in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    x = inputs(2, 8, seed=9)

    def scanned(x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0].sum()

    def looped(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    gradient = jax.jit(jax.grad(scanned))(x)
    np.testing.assert_allclose(gradient, jax.grad(looped)(x), rtol=1e-4, atol=1e-5)
