"""A raw function and its parameters, one weight in int8, one in float8: python jax_functions.py"""

import jax
import jax.numpy as jnp

import policy_core as pc
import policy_jax


def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Gives a two-layer network's output."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"]


def main() -> float:
    """Prints a report, and gives the largest difference from the float parameters."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w1": jax.random.normal(keys[0], (64, 256)) / 8, "b1": jnp.zeros(256)}
    params["w2"] = jax.random.normal(keys[1], (256, 10)) / 16
    x = jax.random.normal(keys[2], (32, 64))
    rules = pc.DTypePolicyMap(
        "float32", {"w1": "int8_from_float32", "w2": "float8/weight_only_from_float32"}
    )
    small = policy_jax.quantize(params, rules)
    print(pc.report(policy_jax.Parameters(small)))
    return float(abs(jax.jit(mlp)(small, x) - mlp(params, x)).max())


if __name__ == "__main__":
    print(f"largest difference {main():.4f}")
