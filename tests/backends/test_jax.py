"""The JAX backend passes the contract: flax nnx, flax linen and equinox."""

import jax
import numpy as np
from flax import nnx

from policy_core.testing import BackendContract


class TestNnx(BackendContract):
    """flax nnx: modules are objects that change in place."""

    backend_name = "jax"

    def linear(self, weight, bias):
        out_features, in_features = weight.shape
        layer = nnx.Linear(in_features, out_features, use_bias=bias is not None, rngs=nnx.Rngs(0))
        layer.kernel[...] = weight.T
        if bias is not None:
            layer.bias[...] = bias
        return layer

    def embedding(self, table):
        layer = nnx.Embed(*table.shape, rngs=nnx.Rngs(0))
        layer.embedding[...] = table
        return layer

    def norm(self, width):
        return nnx.LayerNorm(width, epsilon=1e-5, rngs=nnx.Rngs(0))

    def sequential(self, layers):
        return Chain(layers)

    def layers(self, model):
        return [getattr(model, str(i)) for i in range(model.length)]

    def run(self, model, x, training=False):
        model.train() if training else model.eval()
        return np.asarray(model(jax.numpy.asarray(x)))


class Chain(nnx.Module):
    """Layers one after the other, with their positions as names."""

    def __init__(self, layers):
        self.length = len(layers)
        for i, layer in enumerate(layers):
            setattr(self, str(i), layer)

    def __call__(self, x):
        for i in range(self.length):
            x = getattr(self, str(i))(x)
        return x
