"""torch passes the contract."""

from typing import Any

import pytest
import torch
from torch import nn

import policy_core as pc
from policy_core.testing import BackendContract


class TestTorch(BackendContract):
    """The torch backend."""

    backend_name = "torch"

    def linear(self, weight: Any, bias: Any) -> Any:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(weight))
            if bias is not None:
                layer.bias.copy_(torch.tensor(bias))
        return layer

    def embedding(self, table: Any) -> Any:
        return nn.Embedding.from_pretrained(torch.tensor(table), freeze=False)

    def norm(self, width: int) -> Any:
        return nn.LayerNorm(width)

    def sequential(self, layers: list[Any]) -> Any:
        return nn.Sequential(*layers)

    def layers(self, model: Any) -> list[Any]:
        return list(model)

    def run(self, model: Any, x: Any, training: bool = False) -> Any:
        model.train(training)
        with torch.set_grad_enabled(training):
            y = model(torch.tensor(x) if not hasattr(x, "dtype") else self.tensor(x.copy()))
        return pc.backend("torch").to_numpy(y)


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)
