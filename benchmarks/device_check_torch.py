"""torch's part of device_check.py: int8 and float8 layers on a device against bfloat16."""

import time
from typing import Any

import torch
from torch import nn

import policy_core as pc

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
LARGE = {"sizes": (4096, 8192), "rows": (1, 16, 128, 512, 4096), "train": (4096, 2048)}
SMALL = {"sizes": (96,), "rows": (1, 5), "train": (96, 40)}


def milliseconds(call: Any, device: str, seconds: float) -> float:
    """Gives the median time of a call over at most some seconds, at least five calls."""

    def once() -> float:
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    once()
    once()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 50):
        times.append(once())
    return sorted(times)[len(times) // 2]


def layer_of(size: int, policy: str, device: str) -> Any:
    """Gives a linear layer of one start under a policy, frozen."""
    torch.manual_seed(0)
    return pc.freeze(pc.wrap(nn.Linear(size, size), policy).to(device)).eval()


def correctness(mode: str, size: int, device: str) -> dict[str, Any]:
    """Compares a layer on the device with the same one on the CPU, at sizes that nothing divides."""
    worst = 0.0
    equal = True
    for m, k, n in ((1, size, size), (5, size, size + 1), (17, 33, 31), (0, 16, 16)):
        torch.manual_seed(0)
        plain = nn.Linear(k, n)
        x = torch.randn(m, k)
        here = pc.freeze(pc.wrap(nn.Linear(k, n), f"{mode}_from_float32"))
        here.load_state_dict(plain.state_dict())
        with torch.no_grad():
            wanted = here(x)
            y = here.to(device)(x.to(device)).cpu()
        equal &= torch.equal(y, wanted)
        bound = x.abs() @ plain.weight.detach().abs().T + 1e-20
        if m:
            worst = max(worst, float(((y - wanted).abs() / bound).max()))
    # int8 promises bits; the float8 sums are each within 1e-6 of the exact one.
    right = equal if mode == "int8" else worst <= 1e-5
    return {"right": right, "equal_to_the_bit": equal, "worst_relative_to_sum": worst}


def speed(mode: str, size: int, rows: int, device: str, seconds: float) -> dict[str, Any]:
    """Times a layer in a mode against the same one in bfloat16, eager."""
    x = torch.randn(rows, size, device=device, dtype=torch.bfloat16)
    float_layer = nn.Linear(size, size).to(device, torch.bfloat16)
    layer = layer_of(size, f"{mode}_from_mixed_bfloat16", device)
    with torch.no_grad():
        base = milliseconds(lambda: float_layer(x), device, seconds)
        ours = milliseconds(lambda: layer(x), device, seconds)
    return {
        "mode": mode,
        "size": size,
        "rows": rows,
        "bfloat16_ms": base,
        "ms": ours,
        "times_faster": base / ours,
    }


def training(mode: str, size: int, rows: int, device: str, seconds: float) -> dict[str, Any]:
    """Times a training step in a float8 mode against mixed_bfloat16, and checks its gradients."""
    x = torch.randn(rows, size, device=device, requires_grad=True)

    def step(layer: nn.Module) -> None:
        layer.zero_grad()
        layer(x).float().square().mean().backward()

    layers = {}
    for policy in ("mixed_bfloat16", f"{mode}_from_mixed_bfloat16"):
        torch.manual_seed(0)
        layers[policy] = pc.wrap(nn.Linear(size, size), policy).to(device)
    base, ours = layers.values()
    step(base)
    step(ours)
    error = (ours.weight.grad - base.weight.grad).norm() / base.weight.grad.norm()
    times = [milliseconds(lambda one=one: step(one), device, seconds) for one in (base, ours)]
    return {
        "mode": mode,
        "size": size,
        "rows": rows,
        "mixed_bfloat16_ms": times[0],
        "ms": times[1],
        "times_as_long": times[1] / times[0],
        "gradient_error": float(error),
        "right": float(error) < 0.15,
    }


def check(device: str | None, small: bool, deadline: float) -> dict[str, Any]:
    """Gives everything that was found; speeds only up to a moment of time.perf_counter."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    plan = SMALL if small else LARGE
    seconds = 0.01 if small else 1.0
    start = time.perf_counter()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "kernels": {}}
    found["correct"], found["speed"], found["training"], found["skipped"] = {}, [], [], 0
    for mode in MODES:
        layer = layer_of(64, f"{mode}_from_mixed_bfloat16", device)
        (row,) = pc.report(layer).rows
        found["kernels"][mode] = f"{row.kernel} {row.note}".strip()
        found["correct"][mode] = correctness(mode, plan["sizes"][0], device)
        for size in plan["sizes"]:
            for rows in plan["rows"]:
                if time.perf_counter() > deadline:
                    found["skipped"] += 1
                else:
                    found["speed"].append(speed(mode, size, rows, device, seconds))
    for mode in ("float8", "float8/dynamic"):
        found["training"].append(training(mode, *plan["train"], device, seconds))
    checks = [*found["correct"].values(), *found["training"]]
    found["right"] = all(check["right"] for check in checks)
    found["seconds"] = time.perf_counter() - start
    return found
