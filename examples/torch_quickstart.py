"""Trains one small transformer under three policies, then makes it smaller: python torch_quickstart.py

The text is Python's own documentation, which every Python brings along. From one start the model learns
to predict the next character under float32, mixed_bfloat16 and float8; the final losses agree within
2 %. Then the float8 model is frozen to its codes, and the mixed one is wrapped in int8: within 2 % again.
"""

import argparse
import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import policy_core as pc

POLICIES = ("float32", "mixed_bfloat16", "float8_from_mixed_bfloat16")
LENGTH, BATCH, WIDTH = 64, 16, 64


class Transformer(nn.Module):
    """Predicts each character of a text from those before it."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, symbols)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Gives scores of shape (batch, length, symbols) for ids of shape (batch, length)."""
        x = self.symbol(ids) + self.place(torch.arange(ids.shape[1]))
        hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        return self.head(self.norm(self.layers(x, mask=hidden)))


def read_text() -> tuple[torch.Tensor, int]:
    """Gives the documentation as ids, and how many different characters it has."""
    text = "\n".join(topics.values())[:400_000]
    symbols = sorted(set(text))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    return torch.tensor([number[symbol] for symbol in text]), len(symbols)


def batches(text: torch.Tensor, count: int, seed: int) -> Iterator[torch.Tensor]:
    """Gives batches of pieces of the text, of shape (BATCH, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts])


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Gives the mean cross entropy of the next character, in float32."""
    scores = model(batch[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())


def train(model: nn.Module, text: torch.Tensor, steps: int) -> None:
    """Trains a model in place."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.train()
    for batch in batches(text, steps, seed=1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor) -> float:
    """Gives a model's mean loss on pieces that are the same for all."""
    model.eval()
    losses = [loss_of(model, batch) for batch in batches(text, 30, seed=2)]
    return float(torch.stack(losses).mean())


def main(steps: int = 300) -> dict[str, float]:
    """Trains, prints a table, and gives each form's loss."""
    torch.set_num_threads(1)  # a model this small has nothing to share between threads
    text, symbols = read_text()
    text, held_out = text[:-40_000], text[-40_000:]
    losses, models = {}, {}
    for policy in POLICIES:
        torch.manual_seed(0)
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
