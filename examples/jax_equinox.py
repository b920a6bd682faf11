"""An equinox model in int8, in two lines: python jax_equinox.py"""

import equinox as eqx
import jax

import policy_core as pc


def main() -> float:
    """Prints a report, and gives the largest difference from the float model."""
    model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (32, 64))
    small = pc.wrap(model, "int8_from_float32")
    print(pc.report(small))
    return float(abs(jax.vmap(small)(x) - jax.vmap(model)(x)).max())


if __name__ == "__main__":
    print(f"largest difference {main():.4f}")
