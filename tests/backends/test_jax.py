"""The JAX backend passes the contract: flax nnx, flax linen and equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import policy_jax
from policy_core.testing import BackendContract

KEY = jax.random.key(0)


class TestNnx(BackendContract):
    """flax nnx: modules are objects that change in place."""

    backend_name = "jax"

    def linear(self, weight, bias):
        out_features, in_features = weight.shape
        # Initializers that give what is wanted: random ones would be compiled for each shape.
        return nnx.Linear(
            in_features,
            out_features,
            use_bias=bias is not None,
            kernel_init=lambda *_: jnp.asarray(weight.T),
            bias_init=lambda *_: jnp.asarray(bias),
            rngs=nnx.Rngs(0),
        )

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
        return np.asarray(model(jnp.asarray(x)))


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


class TestEquinox(BackendContract):
    """equinox: modules are values, and state goes in and comes out."""

    backend_name = "jax"
    mutable_models = False

    def linear(self, weight, bias):
        out_features, in_features = weight.shape
        # Without values: random ones would be compiled for each shape.
        layer = eqx.filter_eval_shape(
            eqx.nn.Linear, in_features, out_features, use_bias=bias is not None, key=KEY
        )
        layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(weight))
        if bias is not None:
            layer = eqx.tree_at(lambda layer: layer.bias, layer, jnp.asarray(bias))
        return layer

    def embedding(self, table):
        return eqx.nn.Embedding(weight=jnp.asarray(table))

    def norm(self, width):
        return eqx.nn.LayerNorm(width)

    def sequential(self, layers):
        return eqx.nn.Sequential(layers)

    def layers(self, model):
        return list(model.layers)

    def run(self, model, x, training=False):
        x = jnp.asarray(x)
        leading = x.shape if x.dtype == jnp.int32 else x.shape[:-1]
        # As equinox's users do: its layers take one example.
        rows = x.reshape((-1, *x.shape[len(leading) :]) if x.size else (0, x.shape[-1]))
        if not training:
            y = jax.vmap(model)(rows)
        else:
            y, after = policy_jax.with_state(lambda model: jax.vmap(model)(rows))(model)
            # The contract looks at the model it has; a user would go on with the new one.
            for name, value in vars(after).items():
                object.__setattr__(model, name, value)
        return np.asarray(y).reshape(*leading, y.shape[-1])


class TestLinen(BackendContract):
    """flax linen: a module and its variables; a new pair comes back."""

    backend_name = "jax"
    mutable_models = False
    picklable = False  # linen's own modules hold initializers that are local functions

    def linear(self, weight, bias):
        params = {"kernel": jnp.asarray(weight.T)}
        if bias is not None:
            params["bias"] = jnp.asarray(bias)
        return linen.Dense(weight.shape[0], use_bias=bias is not None), params

    def embedding(self, table):
        return linen.Embed(*table.shape), {"embedding": jnp.asarray(table)}

    def norm(self, width):
        params = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        return linen.LayerNorm(epsilon=1e-5), params

    def sequential(self, layers):
        modules, params = zip(*layers, strict=True)
        variables = {"params": {str(i): own for i, own in enumerate(params)}}
        return LinenChain(tuple(modules)), variables

    def layers(self, model):
        module, _ = model
        return [module.table[path] for path in sorted(module.table)]

    def run(self, model, x, training=False):
        module, variables = model
        if not training:
            return np.asarray(module.apply(variables, jnp.asarray(x)))
        y, updates = module.apply(variables, jnp.asarray(x), mutable=["float8"])
        # The contract looks at the pair it has; a user would go on with new variables.
        variables.update(updates)
        return np.asarray(y)


class LinenChain(linen.Module):
    """Layers one after the other, with their positions as names."""

    modules: tuple

    @linen.compact
    def __call__(self, x):
        for i, module in enumerate(self.modules):
            x = module.copy(name=str(i))(x)
        return x
