"""A training step of one wrapped linear layer: forward, backward, and the casts between.

python -m pytest benchmarks/torch/test_training.py --benchmark-enable --benchmark-only
"""

from typing import Any

import pytest
import torch
from torch import nn

import policy_core as pc

POLICIES = (
    "float32",
    "mixed_bfloat16",
    "float8_from_mixed_bfloat16",
    "float8/dynamic_from_mixed_bfloat16",
)


@pytest.mark.benchmark(group="training step, 512 rows, 4096 x 4096")
@pytest.mark.parametrize("policy", POLICIES)
def test_step(benchmark: Any, policy: str) -> None:
    """A step gives the layer's gradients."""
    rows, size = (512, 4096) if benchmark.enabled else (3, 16)
    layer = pc.wrap(nn.Linear(size, size), policy)
    x = torch.randn(rows, size, requires_grad=True)

    def step() -> None:
        layer.zero_grad()
        layer(x).float().sum().backward()

    step()
    benchmark(step)
    assert layer.weight.grad.shape == (size, size)
