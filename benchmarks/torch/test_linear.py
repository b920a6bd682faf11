"""A wrapped linear layer beside torch's own and its usual replacements, outside training.

    python -m pytest benchmarks/torch --benchmark-enable --benchmark-only --benchmark-group-by=param:shape

Without `--benchmark-enable` every call runs once, on small sizes, as a test.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import policy_core as pc

# (rows, in, out): a square layer, then the projections of a transformer of width 768 and 2048.
SHAPES = [
    *((m, 4096, 4096) for m in (1, 16, 128, 512)),
    *((m, 768, 3072) for m in (1, 128)),
    *((m, 2048, 8192) for m in (1, 128)),
]
OURS = (
    "int8_from_float32",
    "int8_from_mixed_bfloat16",
    "int8/weight_only_from_mixed_bfloat16",
    "float8_from_mixed_bfloat16",
    "float8/dynamic_from_mixed_bfloat16",
    "float8/weight_only_from_mixed_bfloat16",
)


def plain(dtype: torch.dtype) -> Callable[[nn.Linear], nn.Module]:
    return lambda layer: layer.to(dtype)


def ours(policy: str) -> Callable[[nn.Linear], nn.Module]:
    return lambda layer: pc.freeze(pc.wrap(layer, policy))


def quantize_dynamic(layer: nn.Linear) -> nn.Module:
    quantized: nn.Module = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(layer), {nn.Linear}, torch.qint8
    )
    return quantized


def torchao(layer: nn.Linear) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(layer)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return model


def torchao_compiled(layer: nn.Linear) -> nn.Module:
    model: Any = torch.compile(torchao(layer))
    return model


CASES: dict[str, tuple[Callable[[nn.Linear], nn.Module], torch.dtype]] = {
    "torch-float32": (plain(torch.float32), torch.float32),
    "torch-bfloat16": (plain(torch.bfloat16), torch.bfloat16),
    "quantize_dynamic": (quantize_dynamic, torch.float32),
    "torchao-int8": (torchao, torch.float32),
    "torchao-int8-compiled": (torchao_compiled, torch.float32),
    **{
        policy: (ours(policy), torch.bfloat16 if "bfloat16" in policy else torch.float32)
        for policy in OURS
    },
}


# quantize_dynamic and torchao warn of their own deprecations; inductor of torch's.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.benchmark(group="linear")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("case", CASES)
def test_linear(benchmark: Any, case: str, shape: tuple[int, int, int]) -> None:
    """A layer gives its output for a batch of rows."""
    m, k, n = shape if benchmark.enabled else (shape[0] % 8, 16, 24)
    if "compiled" in case and not benchmark.enabled:
        pytest.skip("takes a minute to compile, and is no code of ours")
    torch.manual_seed(0)
    make, dtype = CASES[case]
    layer = make(nn.Linear(k, n)).eval()
    x = torch.randn(m, k).to(dtype)
    with torch.inference_mode():
        layer(x)
        layer(x)
        y = benchmark(layer, x)
    assert y.shape == (m, n)
