"""Products side by side: these kernels, each instruction set, and what else there is.

    python benchmarks/kernels/bench_linear.py [--json FILE] [--shapes large|layers|ragged|all]
        [--peers all|float|none] [--threads 2] [--rounds 7]

Every contender of a shape runs in this one process, in turn, `rounds` times round; before its turn
all others' threads are given time to fall asleep, and its first call of a turn is not counted. A
time is the median of all counted calls, in milliseconds, x and y in numpy or torch memory, weights
quantized and packed beforehand, quantization of x included. The limits are measured in the same
turns: for int8 and bfloat16 the rate of products that never leave the registers, for one row the
rate at which the threads read the packed weight's bytes.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from limits import Limits
from peers import FLOAT_PEERS, PEERS, Operands, available

import policy_kernels as pk
from policy_kernels._info import cpu_name

SHAPES = {
    "large": [(m, 4096, 4096) for m in (1, 16, 128, 512)],
    "layers": [
        (m, n, k)
        for n, k in ((1536, 384), (384, 1536), (3072, 768), (11008, 4096))
        for m in (1, 32, 256)
    ],
    "ragged": [(3, 1001, 777), (17, 333, 4099), (100, 5000, 129)],
}

REST_SECONDS = 0.01
TURN_SECONDS = 0.02
MOST_CALLS = 20

Calls = dict[str, Callable[[], Any]]


def our_calls(operands: Operands, isas: list[str]) -> Calls:
    """Our products: int8, int8 weight only, float8 and float8 weight only; forced where named."""
    x, weight, bias = operands
    scale = np.abs(weight).max(1) / np.float32(127)
    codes = np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8)
    bits, scale8 = pk.quantize_rows_f8(weight, "float8_e4m3fn")
    packed, packed8 = pk.pack(codes), pk.pack(bits, "float8_e4m3fn")
    half = x.astype(ml_dtypes.bfloat16)
    x8, x8_scale = pk.quantize_rows_f8(x, "float8_e4m3fn")
    e4 = "float8_e4m3fn"
    calls: Calls = {
        "s8": lambda: pk.linear_s8(x, packed, scale, bias),
        "s8 bfloat16": lambda: pk.linear_s8(half, packed, scale, bias),
        "s8w": lambda: pk.linear_s8w(x, packed, scale, bias),
        "s8w bfloat16": lambda: pk.linear_s8w(half, packed, scale, bias),
        "f8w": lambda: pk.linear_f8w(x, packed8, scale8, bias=bias),
        "f8w bfloat16": lambda: pk.linear_f8w(half, packed8, scale8, bias=bias),
        "f8": lambda: pk.linear_f8(x8, x8_scale, e4, packed8, scale8, e4, bias),
    }
    best = str(pk.build_info().isa)
    for isa in isas:

        def forced(isa: str = isa) -> None:
            pk.set_isa(isa)
            pk.linear_s8(x, packed, scale, bias)
            pk.set_isa(best)

        calls[f"s8 {isa}"] = forced
    return calls


def turn(call: Callable[[], Any]) -> list[float]:
    """Times in milliseconds of some calls in a row, after a rest and one call that is not counted."""
    time.sleep(REST_SECONDS)
    call()
    times: list[float] = []
    while len(times) < MOST_CALLS and (len(times) < 3 or sum(times) < TURN_SECONDS * 1e3):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(calls: Calls, rounds: int) -> dict[str, float]:
    """The median of each contender, all of them taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += turn(call)
    return {name: statistics.median(of) for name, of in times.items()}


def limits_of(limits: Limits, m: int, n: int, k: int) -> Calls:
    """Calls that give the shortest possible time of a product, in milliseconds, by each limit."""
    memory = np.zeros(n * k, np.uint8)
    macs = m * n * k
    calls: Calls = {"reading": lambda: n * k / limits.reading(memory) * 1e-6}
    for kind in ("int8", "bfloat16"):
        if limits.products(kind) > 0:
            calls[kind] = lambda kind=kind: macs / limits.products(kind) * 1e-6
    return calls


def run(shape: tuple[int, int, int], options: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """Measures one shape."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    operands = Operands(
        rng.standard_normal((m, k), np.float32),
        rng.standard_normal((n, k), np.float32) / np.float32(np.sqrt(k)),
        rng.standard_normal(n, np.float32),
    )
    calls = our_calls(operands, list(pk.build_info().present_isas[1:]))
    names = {"all": list(PEERS), "float": list(FLOAT_PEERS), "none": []}[options.peers]
    peers = dict(available(operands, options.threads, names))
    bounds: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, milliseconds in measure({**calls, **peers}, 1).items():
            times.setdefault(name, []).append(milliseconds)
        for name, bound in limits_of(limits, m, n, k).items():
            bounds.setdefault(name, []).extend(bound() for _ in range(5))
    result = {name: statistics.median(of) for name, of in times.items()}
    # The limit is the machine at its best; a disturbed measurement only makes it look lower.
    best = {name: min(of) for name, of in bounds.items()}
    return {"shape": shape, "ms": result, "limit_ms": best, "peers": list(peers)}


def line(name: str, result: dict[str, Any]) -> str:
    """One contender: its time, and how many times its time each peer takes."""
    own = result["ms"][name]
    ratios = "  ".join(f"{result['ms'][peer] / own:6.2f}" for peer in result["peers"])
    m = result["shape"][0]
    kind = "int8" if name.split()[0] == "s8" else "bfloat16"
    limit = result["limit_ms"].get("reading" if m == 1 else kind) if m == 1 or m >= 128 else None
    fraction = f"{limit / own:5.0%}" if limit and name not in result["peers"] else "    -"
    return f"  {name:<22} {own:9.3f}  {fraction}  {ratios}"


def show(result: dict[str, Any]) -> None:
    m, n, k = result["shape"]
    print(
        f"\nM={m} N={n} K={k}" + "".join(f"  {i + 1}: {p}" for i, p in enumerate(result["peers"]))
    )
    head = "  ".join(f"{f'x of {i + 1}':>6}" for i in range(len(result["peers"])))
    print(f"  {'':<22} {'ms':>9}  limit  {head}")
    for name in result["ms"]:
        print(line(name, result))
    bounds = ", ".join(f"{name} {value:.3f}" for name, value in result["limit_ms"].items())
    print(f"  limits in ms: {bounds}", flush=True)


def pack_milliseconds(n: int, k: int) -> float:
    codes = np.random.default_rng(0).integers(-127, 128, (n, k), np.int8)
    weights: list[pk.PackedWeight] = []
    times = []
    for _ in range(9):
        start = time.perf_counter()
        weights = [pk.pack(codes)]
        times.append((time.perf_counter() - start) * 1e3)
    assert weights
    return statistics.median(times)


def call_microseconds() -> float:
    """The shortest time of a product that has next to nothing to do."""
    one = np.ones((1, 8), np.float32)
    weight, scale = pk.pack(np.ones((8, 8), np.int8)), np.ones(8, np.float32)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            pk.linear_s8(one, weight, scale, scale)
        best = min(best, (time.perf_counter() - start) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare products with what else there is.")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--shapes", choices=[*SHAPES, "all"], default="large")
    parser.add_argument("--peers", choices=["all", "float", "none"], default="all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers' own
    pk.set_num_threads(options.threads)
    info = pk.build_info()
    print(f"{cpu_name()}, {options.threads} threads, {info!r}, numpy {np.__version__}")
    facts = {"pack_4096x4096_ms": pack_milliseconds(4096, 4096), "call_us": call_microseconds()}
    print(
        f"packing 4096 x 4096: {facts['pack_4096x4096_ms']:.2f} ms; "
        f"a call with next to nothing to do: {facts['call_us']:.2f} us"
    )
    limits = Limits(options.threads)
    kinds = list(SHAPES) if options.shapes == "all" else [options.shapes]
    shapes = [shape for kind in kinds for shape in SHAPES[kind]]
    results = []
    for shape in shapes:
        results.append(run(shape, options, limits))
        show(results[-1])
    if options.json:
        machine = {"cpu": cpu_name(), "system": platform.platform(), "threads": options.threads}
        text = json.dumps({**machine, **facts, "results": results}, indent=2)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
