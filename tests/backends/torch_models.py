"""Models and inputs that several tests of the torch backend use."""

from typing import Any

import torch
from torch import nn

import policy_core as pc

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
FORMS = ("float32", "mixed_bfloat16", *(f"{mode}_from_float32" for mode in MODES))


def seeded(make: Any) -> Any:
    """Gives what a function makes, with the same random weights at each call."""
    torch.manual_seed(0)
    return make()


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    """Gives random numbers of a shape, the same at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(model: nn.Module) -> dict[str, bool]:
    """Gives for each layer's path whether it computes with codes."""
    return {row.path: row.quantized for row in pc.report(model).rows}


def notes(model: nn.Module) -> dict[str, str]:
    """Gives for each layer's path what the report has to say."""
    return {row.path: row.note for row in pc.report(model).rows}


def close(y: torch.Tensor, wanted: torch.Tensor, part: float = 0.1) -> bool:
    """Says whether two tensors differ by at most a part of the largest value."""
    return bool((y.float() - wanted).abs().max() <= part * wanted.abs().max())


def conv1d_of_hugging_face() -> type[nn.Module]:
    """Gives a class as transformers has it: a linear layer with a weight of shape (in, out)."""

    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf = nf
            self.weight = nn.Parameter(torch.randn(nx, nf))
            self.bias = nn.Parameter(torch.randn(nf))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.size()[:-1], self.nf)
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)

    Conv1D.__module__ = "transformers.pytorch_utils"
    return Conv1D


def encoder(norm_first: bool = False) -> nn.Module:
    """Gives a transformer encoder of two layers, of width 16."""
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))
