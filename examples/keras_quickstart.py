"""Trains one small transformer under three policies, then makes it smaller: python keras_quickstart.py

Keras runs on whatever KERAS_BACKEND says: torch, jax or tensorflow. The text is Python's own
documentation, which every Python brings along. From one start the model learns to predict the next
character under float32, mixed_bfloat16 and float8; the final losses agree within 2 %. Then the float8
model is frozen to its codes, and the mixed one is wrapped in int8: within 2 % again. The int8 model
goes through a .keras file.
"""

import argparse
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers

import policy_core as pc

POLICIES = ("float32", "mixed_bfloat16", "float8_from_mixed_bfloat16")
LENGTH, BATCH, WIDTH = 64, 16, 64


@keras.saving.register_keras_serializable("keras_quickstart")
class Places(layers.Layer):
    """Adds to each character what is learned about its place."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.table = layers.Embedding(LENGTH, WIDTH)

    def build(self, shape: tuple[int, ...]) -> None:
        """Makes the table."""
        self.table.build()

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Gives the sum for characters of shape (batch, LENGTH, WIDTH)."""
        return x + self.table(keras.ops.arange(LENGTH))


def transformer(symbols: int) -> keras.Model:
    """Gives a model that predicts each character of a text from those before it."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = Places(name="place")(layers.Embedding(symbols, WIDTH, name="symbol")(ids))
    for i in range(2):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(4, WIDTH // 4, name=f"attention{i}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"up{i}")(y)
        x = x + layers.Dense(WIDTH, name=f"down{i}")(y)
    x = layers.LayerNormalization()(x)
    return keras.Model(ids, layers.Dense(symbols, name="head")(x))


def read_text() -> tuple[np.ndarray, int]:
    """Gives the documentation as ids, and how many different characters it has."""
    text = "\n".join(topics.values())[:400_000]
    symbols = sorted(set(text))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    return np.array([number[symbol] for symbol in text], np.int32), len(symbols)


def pieces(text: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives pieces of the text, and the characters that follow, both of shape (count, LENGTH)."""
    starts = np.random.default_rng(seed).integers(len(text) - LENGTH - 1, size=count)
    whole = np.stack([text[start : start + LENGTH + 1] for start in starts])
    return whole[:, :-1], whole[:, 1:]


def prepare(model: keras.Model, steps: int) -> None:
    """Compiles a model, as every change of its layers asks for."""
    rate = keras.optimizers.schedules.CosineDecay(
        3e-4, steps, warmup_target=3e-3, warmup_steps=steps // 4
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(rate), loss)


def main(steps: int = 300) -> dict[str, float]:
    """Trains, prints a table, and gives each form's loss."""
    text, symbols = read_text()
    train, held_out = text[:-40_000], text[-40_000:]
    x, y = pieces(train, steps * BATCH, seed=1)
    test = pieces(held_out, 30 * BATCH, seed=2)
    losses, models = {}, {}
    for policy in POLICIES:
        keras.utils.set_random_seed(0)
        model = models[policy] = pc.wrap(transformer(symbols), policy)
        prepare(model, steps)
        start = time.perf_counter()
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        losses[policy] = model.evaluate(*test, batch_size=BATCH, verbose=0)
        print(f"{policy:28} loss {losses[policy]:.4f}  {time.perf_counter() - start:5.1f} s")

    frozen, small = models["float8_from_mixed_bfloat16"], models["mixed_bfloat16"]
    for model in (frozen, small):
        model.optimizer = None  # trained: what it knew of the float weights may go
    pc.freeze(frozen)
    pc.wrap(small, "int8_from_mixed_bfloat16", on_wrapped="replace")
    with tempfile.TemporaryDirectory() as folder:
        small.save(Path(folder) / "small.keras")
        small = keras.models.load_model(Path(folder) / "small.keras", compile=False)
    for name, model in (("frozen float8", frozen), ("int8", small)):
        prepare(model, steps)
        losses[name] = model.evaluate(*test, batch_size=BATCH, verbose=0)
        sizes = pc.report(model)
        saved = f"{sizes.bytes_before:,} -> {sizes.bytes_after:,} bytes"
        print(f"{name:28} loss {losses[name]:.4f}  {saved}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps a policy")
    main(parser.parse_args().steps)
