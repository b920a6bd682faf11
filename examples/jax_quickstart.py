"""Trains one small transformer under three policies, then makes it smaller: python jax_quickstart.py

The text is Python's own documentation, which every Python brings along. From one start the model learns
to predict the next character under float32, mixed_bfloat16 and float8; the final losses agree within
2 %. Then the float8 model is frozen to its codes, and the mixed one is wrapped in int8: within 2 % again.
"""

import argparse
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import policy_core as pc
import policy_jax

POLICIES = ("float32", "mixed_bfloat16", "float8_from_mixed_bfloat16")
LENGTH, BATCH, WIDTH, HEADS = 64, 16, 64, 4


class Block(nnx.Module):
    """One layer of the transformer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.first = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.second = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Gives the next layer's input."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.second(nnx.gelu(self.first(self.norms[1](x))))


class Transformer(nnx.Module):
    """Predicts each character of a text from those before it."""

    def __init__(self, symbols: int, rngs: nnx.Rngs) -> None:
        self.symbol = nnx.Embed(symbols, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, symbols, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Gives scores of shape (batch, length, symbols) for ids of shape (batch, length)."""
        x = self.symbol(ids) + self.place(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> tuple[np.ndarray, int]:
    """Gives the documentation as ids, and how many different characters it has."""
    text = "\n".join(topics.values())[:400_000]
    symbols = sorted(set(text))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    return np.array([number[symbol] for symbol in text], np.int32), len(symbols)


def batches(text: np.ndarray, count: int, seed: int) -> Iterator[np.ndarray]:
    """Gives batches of pieces of the text, of shape (BATCH, LENGTH + 1)."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        starts = generator.integers(len(text) - LENGTH - 1, size=BATCH)
        yield np.stack([text[start : start + LENGTH + 1] for start in starts])


def loss_of(model: nnx.Module, batch: jax.Array) -> jax.Array:
    """Gives the mean cross entropy of the next character, in float32."""
    scores = model(batch[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[:, 1:]).mean()


@nnx.jit
def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: jax.Array) -> None:
    """Trains for one batch; all that float8 adds is to differentiate its state too."""
    wanted = nnx.DiffState(0, (nnx.Param, policy_jax.Float8GradientState))
    gradients = nnx.grad(loss_of, argnums=wanted)(model, batch)
    if nnx.state(model, policy_jax.Float8GradientState):
        policy_jax.apply_gradient_state(model, gradients)
    optimizer.update(model, nnx.filter_state(gradients, nnx.Param))


def train(model: nnx.Module, text: np.ndarray, steps: int) -> None:
    """Trains a model in place."""
    schedule = optax.cosine_onecycle_schedule(steps, 3e-3)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    model.train()
    for batch in batches(text, steps, seed=1):
        step(model, optimizer, jnp.asarray(batch))


def evaluate(model: nnx.Module, text: np.ndarray) -> float:
    """Gives a model's mean loss on pieces that are the same for all."""
    model.eval()
    loss = nnx.jit(loss_of)
    return float(np.mean([loss(model, batch) for batch in batches(text, 30, seed=2)]))


def main(steps: int = 300) -> dict[str, float]:
    """Trains, prints a table, and gives each form's loss."""
    text, symbols = read_text()
    text, held_out = text[:-40_000], text[-40_000:]
    losses, models = {}, {}
    for policy in POLICIES:
        model = models[policy] = pc.wrap(Transformer(symbols, nnx.Rngs(0)), policy)
        start = time.perf_counter()
        train(model, text, steps)
        losses[policy] = evaluate(model, held_out)
        print(f"{policy:28} loss {losses[policy]:.4f}  {time.perf_counter() - start:5.1f} s")

    frozen = pc.freeze(models["float8_from_mixed_bfloat16"])
    losses["frozen float8"] = evaluate(frozen, held_out)
    small = pc.wrap(models["mixed_bfloat16"], "int8_from_mixed_bfloat16", on_wrapped="replace")
    losses["int8"] = evaluate(small, held_out)
    for name, model in (("frozen float8", frozen), ("int8", small)):
        sizes = pc.report(model)
        saved = f"{sizes.bytes_before:,} -> {sizes.bytes_after:,} bytes"
        print(f"{name:28} loss {losses[name]:.4f}  {saved}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps a policy")
    main(parser.parse_args().steps)
