"""Files: every kind of layer in every mode comes back from one; float files load into any model."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import policy_core as pc
from policy_core.testing import same_bits

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
ROWS = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6, 4), np.float32))
IDS = jnp.arange(5)

NNX = {
    "linear": (lambda rngs: nnx.Linear(4, 5, rngs=rngs), ROWS),
    "linear-bfloat16": (lambda rngs: nnx.Linear(4, 5, param_dtype=jnp.bfloat16, rngs=rngs), ROWS),
    "general": (lambda rngs: nnx.LinearGeneral((6, 4), (5, 2), axis=(1, 2), rngs=rngs), ROWS),
    "einsum": (lambda rngs: nnx.Einsum("abc,cde->abde", (4, 5, 2), (5, 2), rngs=rngs), ROWS),
    "conv": (lambda rngs: nnx.Conv(4, 5, (3,), rngs=rngs), ROWS),
    "attention": (
        lambda rngs: nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=rngs),
        ROWS,
    ),
    "embed": (lambda rngs: nnx.Embed(7, 4, rngs=rngs), IDS),
    "batch-norm": (
        lambda rngs: nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 5, rngs=rngs)),
        ROWS,
    ),
}
EQUINOX = {
    "linear": (lambda key: eqx.nn.Linear(4, 5, key=key), ROWS[0, 0]),
    "conv": (lambda key: eqx.nn.Conv1d(6, 5, 3, key=key), ROWS[0]),
    "embedding": (lambda key: eqx.nn.Embedding(7, 4, key=key), IDS[2]),
    "mlp": (lambda key: eqx.nn.MLP(4, 5, 8, 2, key=key), ROWS[0, 0]),
}
LINEN = {
    "dense": (linen.Dense(5), ROWS),
    "general": (linen.DenseGeneral((5, 2), axis=(1, 2)), ROWS),
    "einsum": (linen.Einsum((4, 5, 2), "abc,cde->abde"), ROWS),
    "attention": (linen.MultiHeadDotProductAttention(2, qkv_features=8), ROWS),
    "embed": (linen.Embed(7, 4), IDS),
}


def comes_back(make, run, mode, path):
    """Saves a model that was wrapped, and loads it into a fresh float one."""
    model = pc.wrap(make(0), f"{mode}_from_float32")
    pc.save(model, path)
    again = pc.load(make(1), path)
    assert [row.asked for row in pc.report(again).rows] == [
        row.asked for row in pc.report(model).rows
    ]
    assert same_bits(run(again), run(model))
    # A float file of the plain model, loaded into a wrapped one, is as if it was wrapped after it.
    pc.save(make(0), path)
    assert same_bits(run(pc.load(pc.wrap(make(1), f"{mode}_from_float32"), path)), run(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", NNX)
def test_nnx_layers_come_back(kind, mode, tmp_path):
    """load(save(m)) computes m's bits, and a float file loads into a wrapped layer."""
    make, x = NNX[kind]

    def run(model):
        model.eval()
        return model(x)

    comes_back(lambda seed: make(nnx.Rngs(seed)), run, mode, tmp_path / "m")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", EQUINOX)
def test_equinox_layers_come_back(kind, mode, tmp_path):
    """load(save(m)) computes m's bits, and a float file loads into a wrapped layer."""
    make, x = EQUINOX[kind]
    comes_back(lambda seed: make(jax.random.key(seed)), lambda m: m(x), mode, tmp_path / "m")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LINEN)
def test_linen_layers_come_back(kind, mode, tmp_path):
    """load(save(m)) computes m's bits, and a float file loads into a wrapped pair."""
    module, x = LINEN[kind]

    def run(pair):
        return pair[0].apply(pair[1], x)

    comes_back(
        lambda seed: (module, module.init(jax.random.key(seed), x)), run, mode, tmp_path / "m"
    )
