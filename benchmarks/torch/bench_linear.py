"""A wrapped linear layer beside torch's own and what people use in its place.

    python benchmarks/torch/bench_linear.py [--json FILE] [--what layers|training|model|all]
        [--threads 2] [--rounds 5] [--small]

With POLICY_NUM_THREADS=2 in the environment the kernels run on threads of their own, else on torch's.

Every contender of a shape runs in this one process, in turn, `rounds` times round. Before its turn
all threads are given time to fall asleep, and its first call of a turn is not counted. A time is the
median of all counted calls, in milliseconds, eager unless the name says compiled. torchao's are left
out where it is not installed (`pip install torchao`).
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import policy_core as pc
from policy_kernels._info import cpu_name

# (rows, in, out): a square layer, then the projections of transformers of width 768 and 2048.
SHAPES = [
    *((m, 4096, 4096) for m in (1, 16, 128, 512)),
    *((m, k, n) for k, n in ((768, 3072), (3072, 768), (2048, 8192)) for m in (1, 128)),
]
POLICIES = (
    "int8_from_float32",
    "int8_from_mixed_bfloat16",
    "int8/weight_only_from_mixed_bfloat16",
    "float8_from_mixed_bfloat16",
    "float8/dynamic_from_mixed_bfloat16",
    "float8/weight_only_from_mixed_bfloat16",
)
MODEL = ("int8_from_float32", "int8_from_mixed_bfloat16", "float8_from_mixed_bfloat16")
TRAINED = (
    "float32",
    "mixed_bfloat16",
    "float8_from_mixed_bfloat16",
    "float8/dynamic_from_mixed_bfloat16",
)
REST_SECONDS = 0.01
TURN_SECONDS = 0.05
MOST_CALLS = 20

Calls = dict[str, Callable[[], Any]]


def torchao(layer: nn.Linear) -> nn.Module:
    """Gives a layer in torchao's dynamic int8."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = nn.Sequential(layer)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def layer_calls(m: int, k: int, n: int, compiled: bool) -> Calls:
    """Gives a call of each contender for one shape, outside training."""

    def fresh() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(k, n).eval()

    x = torch.randn(m, k)
    half = x.bfloat16()
    quantize_dynamic = torch.ao.quantization.quantize_dynamic
    layers: dict[str, tuple[Any, torch.Tensor]] = {
        "torch float32": (fresh(), x),
        "torch bfloat16": (fresh().bfloat16(), half),
        "quantize_dynamic": (quantize_dynamic(nn.Sequential(fresh()), {nn.Linear}), x),
    }
    if find_spec("torchao"):
        layers["torchao int8"] = torchao(fresh()), x
        if compiled:
            layers["torchao int8, compiled"] = torch.compile(torchao(fresh())), x
    for policy in POLICIES:
        layer = pc.freeze(pc.wrap(fresh(), policy))
        layers[policy] = layer, half if "bfloat16" in policy else x
    return {name: lambda one=one, x=x: one(x) for name, (one, x) in layers.items()}


def model_calls(rows: int, width: int) -> Calls:
    """Gives a call of a transformer encoder of two layers, plain and under some policies."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        heads, inner = width // 64 or 1, 4 * width
        layer = nn.TransformerEncoderLayer(width, heads, inner, activation="gelu", batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    x = torch.randn(1, rows, width)
    half = x.bfloat16()
    models = {"torch float32": (fresh(), x), "torch bfloat16": (fresh().bfloat16(), half)}
    for policy in MODEL:
        model = pc.freeze(pc.wrap(fresh(), policy))
        models[policy] = model, half if "bfloat16" in policy else x
    return {name: lambda one=one, x=x: one(x) for name, (one, x) in models.items()}


def training_calls(m: int, k: int, n: int) -> Calls:
    """Gives a training step, forward and backward, under each policy."""
    x = torch.randn(m, k, requires_grad=True)

    def step(layer: nn.Module) -> None:
        layer.zero_grad()
        layer(x).float().sum().backward()

    layers = {policy: pc.wrap(nn.Linear(k, n), policy) for policy in TRAINED}
    return {policy: lambda one=layer: step(one) for policy, layer in layers.items()}


def medians(calls: Calls, rounds: int) -> dict[str, float]:
    """Gives the median time of each call in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(REST_SECONDS)
            call()
            begin = time.perf_counter()
            for _ in range(MOST_CALLS):
                start = time.perf_counter()
                call()
                end = time.perf_counter()
                times[name].append((end - start) * 1e3)
                if end - begin > TURN_SECONDS:
                    break
    return {name: statistics.median(found) for name, found in times.items()}


def show(title: str, found: dict[str, float]) -> None:
    """Prints the times of one shape."""
    print(title)
    for name, time_ms in found.items():
        print(f"    {name:42}{time_ms:10.3f} ms", flush=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the times to a file too")
    parser.add_argument("--what", choices=("layers", "training", "model", "all"), default="all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    # quantize_dynamic and torchao warn of their own deprecations.
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    shapes = [(3, 16, 24)] if options.small else SHAPES
    result: dict[str, Any] = {"cpu": cpu_name(), "torch": torch.__version__}
    result |= {"threads": options.threads, "layers": {}, "training": {}, "model": {}}
    print(f"{result['cpu']}, torch {result['torch']}, {options.threads} threads")
    if options.what in ("layers", "all"):
        with torch.inference_mode():
            for shape in shapes:
                calls = layer_calls(*shape, compiled=not options.small)
                title = "rows {} x in {} x out {}".format(*shape)
                result["layers"][title] = medians(calls, options.rounds)
                show(title, result["layers"][title])
    if options.what in ("model", "all"):
        with torch.inference_mode():
            for rows, width in [(3, 16)] if options.small else [(1, 768), (16, 768), (128, 768)]:
                title = f"encoder of two layers, rows {rows} x width {width}"
                result["model"][title] = medians(model_calls(rows, width), options.rounds)
                show(title, result["model"][title])
    if options.what in ("training", "all"):
        shape = shapes[0] if options.small else (512, 4096, 4096)
        title = "training step, rows {} x in {} x out {}".format(*shape)
        result["training"][title] = medians(training_calls(*shape), options.rounds)
        show(title, result["training"][title])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
