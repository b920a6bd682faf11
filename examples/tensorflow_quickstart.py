"""Trains one small transformer under three policies, then makes it smaller: python tensorflow_quickstart.py

The text is Python's own documentation, which every Python brings along. From one start the model learns
to predict the next character under float32, mixed_bfloat16 and float8; the final losses agree within
2 %. Then the float8 model is frozen to its codes, and the mixed one is wrapped in int8: within 2 % again.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

import policy_core as pc
import policy_tensorflow as pt

POLICIES = ("float32", "mixed_bfloat16", "float8_from_mixed_bfloat16")
LENGTH, BATCH, WIDTH, HEADS = 64, 16, 64, 4


class Block(tf.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (pt.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = pt.Linear(WIDTH, WIDTH)
        self.first, self.second = pt.Linear(WIDTH, 4 * WIDTH), pt.Linear(4 * WIDTH, WIDTH)
        self.norms = [pt.LayerNorm(WIDTH), pt.LayerNorm(WIDTH)]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Gives the next layer's input."""
        x = x + self.attention(self.norms[0](x))
        return x + self.second(tf.nn.gelu(self.first(self.norms[1](x))))

    def attention(self, x: tf.Tensor) -> tf.Tensor:
        """Gives what each place takes from those before it."""
        size = tf.shape(x)[1]
        heads = (-1, size, HEADS, WIDTH // HEADS)
        query, key, value = (
            tf.reshape(layer(x), heads) for layer in (self.queries, self.keys, self.values)
        )
        scores = tf.cast(tf.einsum("bqhd,bkhd->bhqk", query, key), tf.float32)
        hidden = 1 - tf.linalg.band_part(tf.ones((size, size)), -1, 0)
        weights = tf.nn.softmax(scores * (WIDTH // HEADS) ** -0.5 - 1e9 * hidden)
        mixed = tf.einsum("bhqk,bkhd->bqhd", tf.cast(weights, value.dtype), value)
        return self.output(tf.reshape(mixed, tf.shape(x)))


class Transformer(tf.Module):
    """Predicts each character of a text from those before it."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbol, self.place = pt.Embedding(symbols, WIDTH), pt.Embedding(LENGTH, WIDTH)
        self.layers = [Block(), Block()]
        self.norm = pt.LayerNorm(WIDTH)
        self.head = pt.Linear(WIDTH, symbols)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Gives scores of shape (batch, length, symbols) for ids of shape (batch, length)."""
        x = self.symbol(ids) + self.place(tf.range(tf.shape(ids)[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def read_text() -> tuple[np.ndarray, int]:
    """Gives the documentation as ids, and how many different characters it has."""
    text = "\n".join(topics.values())[:400_000]
    symbols = sorted(set(text))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    return np.array([number[symbol] for symbol in text], np.int32), len(symbols)


def batches(text: np.ndarray, count: int, seed: int) -> Iterator[tf.Tensor]:
    """Gives batches of pieces of the text, of shape (BATCH, LENGTH + 1)."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        starts = generator.integers(len(text) - LENGTH - 1, size=BATCH)
        yield tf.constant(np.stack([text[start : start + LENGTH + 1] for start in starts]))


def loss_of(model: tf.Module, batch: tf.Tensor) -> tf.Tensor:
    """Gives the mean cross entropy of the next character, in float32."""
    scores = tf.cast(model(batch[:, :-1]), tf.float32)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch[:, 1:], logits=scores)
    )


def train(model: tf.Module, text: np.ndarray, steps: int) -> None:
    """Trains a model in place."""
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=3e-3, warmup_steps=max(steps // 5, 1)
    )
    optimizer = keras.optimizers.AdamW(schedule)

    @tf.function
    def step(batch: tf.Tensor) -> None:
        with pt.training(), tf.GradientTape() as tape:
            loss = loss_of(model, batch)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for batch in batches(text, steps, seed=1):
        step(batch)


def evaluate(model: tf.Module, text: np.ndarray) -> float:
    """Gives a model's mean loss on pieces that are the same for all."""
    step = tf.function(lambda batch: loss_of(model, batch), autograph=False)
    return float(np.mean([step(batch) for batch in batches(text, 30, seed=2)]))


def main(steps: int = 300) -> dict[str, float]:
    """Trains, prints a table, and gives each form's loss."""
    text, symbols = read_text()
    text, held_out = text[:-40_000], text[-40_000:]
    losses, models = {}, {}
    for policy in POLICIES:
        tf.random.set_seed(0)
        model = models[policy] = pc.wrap(Transformer(symbols), policy)
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
