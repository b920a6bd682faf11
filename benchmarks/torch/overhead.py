"""What a wrapped layer costs above its kernel, in microseconds: python benchmarks/torch/overhead.py"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import policy_core as pc
import policy_kernels


def microseconds(call: Callable[[], Any], calls: int = 2000, rounds: int = 9) -> float:
    """Gives the least time of a call over some rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)


def main() -> None:
    """Prints a table for one row through a layer of 64 x 64."""
    torch.set_num_threads(1)
    x = torch.randn(1, 64)
    with torch.inference_mode():
        plain = nn.Linear(64, 64)
        print(f"{'plain nn.Linear':40}{microseconds(lambda: plain(x)):8.1f}")
        layer = pc.wrap(nn.Linear(64, 64), "int8_from_float32")
        packed = policy_kernels.pack(layer.weight_codes.numpy())
        arrays = x.numpy(), packed, layer.weight_scale.reshape(-1).numpy(), layer.bias.numpy()
        kernel = microseconds(lambda: policy_kernels.linear_s8(*arrays))
        print(f"{'policy_kernels.linear_s8 on numpy':40}{kernel:8.1f}")
        for mode in ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only"):
            policy = f"{mode}_from_float32"
            layer = pc.freeze(pc.wrap(nn.Linear(64, 64), policy))
            print(f"{policy:40}{microseconds(lambda one=layer: one(x)):8.1f}")


if __name__ == "__main__":
    main()
