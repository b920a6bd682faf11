"""JAX's part of device_check.py: int8 and float8 layers on a device against bfloat16."""

import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import policy_core as pc
import policy_numpy

MODES = ("int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only")
LARGE = {"sizes": (4096, 8192), "rows": (1, 16, 512, 4096), "train": (4096, 2048)}
SMALL = {"sizes": (96,), "rows": (1, 5), "train": (96, 40)}
Call = Callable[[Any], Any]


def milliseconds(call: Call, x: jax.Array, seconds: float) -> float:
    """Gives the median time of a call, waiting only for the last of ten at a time."""
    jax.block_until_ready(call(x))
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < seconds and len(times) < 20):
        start = time.perf_counter()
        for _ in range(10):
            y = call(x)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - start) * 1e2)
    return sorted(times)[len(times) // 2]


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    """Gives normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def layer_of(k: int, n: int, policy: str) -> nnx.Module:
    """Gives a linear layer of one start under a policy, frozen."""
    layer = nnx.Linear(k, n, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(inputs(k, n) / k**0.5))
    layer.bias.set_value(jnp.asarray(inputs(n, seed=1)))
    pc.freeze(pc.wrap(layer, policy)).eval()
    return layer


def jitted(layer: nnx.Module) -> tuple[Call, Any]:
    """Gives a compiled call with the layer's state for an argument, and a function that lowers it."""
    graph, state = nnx.split(layer)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return (lambda x: call(state, x)), (lambda x: call.lower(state, x))


def what_ran(mode: str, size: int) -> dict[str, Any]:
    """Gives the kernel that the report names, and the products of the program that was compiled."""
    layer = layer_of(size, size, f"{mode}_from_mixed_bfloat16")
    (row,) = pc.report(layer).rows
    _, lower = jitted(layer)
    x = jnp.ones((32, size), jnp.bfloat16)
    text = lower(x).compile().as_text()
    products = set(re.findall(r'custom_call_target="([^"]+)"', text))
    products |= {"dot"} if re.search(r"= \S+ dot\(", text) else set()
    products |= {"__triton_gemm"} if "__triton_gemm" in text else set()
    return {"kernel": row.kernel, "note": row.note, "compiled": sorted(products)}


def correctness(mode: str, size: int) -> dict[str, Any]:
    """Compares a layer on the device with the reference, at sizes that nothing divides."""
    worst, equal = 0.0, True
    for m, k, n in ((1, size, size), (5, size, size + 1), (17, 33, 31), (0, 16, 16)):
        policy = f"{mode}_from_float32"
        layer = layer_of(k, n, policy)
        dense = policy_numpy.Dense(k, n)
        dense.tensors["weight"] = np.ascontiguousarray((inputs(k, n) / k**0.5).T)
        dense.tensors["bias"] = inputs(n, seed=1)
        x = inputs(m, k, seed=2)
        bound = np.abs(x) @ np.abs(dense.tensors["weight"]).T + 1e-20
        wanted = pc.freeze(pc.wrap(dense, policy))(x)
        y = np.asarray(jitted(layer)[0](jnp.asarray(x)))
        equal &= y.shape == wanted.shape and np.array_equal(y, wanted)
        if m:
            worst = max(worst, float((np.abs(y - wanted) / bound).max()))
    # int8 promises bits; the float8 sums are each within 1e-6 of the exact one.
    right = equal if mode == "int8" else worst <= 1e-5
    return {"right": right, "equal_to_the_bit": equal, "worst_relative_to_sum": worst}


@nnx.jit
def gradient(layer: nnx.Module, x: jax.Array) -> Any:
    """Gives the gradient of the parameters in a training call, which moves float8 states."""

    def loss(layer: Any) -> jax.Array:
        return jnp.square(layer(x).astype(jnp.float32)).mean()

    return nnx.grad(loss)(layer)


def training(mode: str, size: int, rows: int, seconds: float) -> dict[str, Any]:
    """Times a gradient in a float8 mode against mixed_bfloat16, and compares the two."""
    x = jnp.asarray(inputs(rows, size))
    times, gradients = [], []
    for policy in ("mixed_bfloat16", f"{mode}_from_mixed_bfloat16"):
        layer = pc.wrap(nnx.Linear(size, size, rngs=nnx.Rngs(0)), policy)
        gradients.append(gradient(layer, x)["kernel"].get_value())
        times.append(milliseconds(functools.partial(gradient, layer), x, seconds))
    base, ours = gradients
    error = float(jnp.linalg.norm(ours - base) / jnp.linalg.norm(base))
    return {
        "mode": mode,
        "size": size,
        "rows": rows,
        "mixed_bfloat16_ms": times[0],
        "ms": times[1],
        "times_as_long": times[1] / times[0],
        "gradient_error": error,
        "right": error < 0.15,
    }


def check(device: str | None, small: bool, deadline: float) -> dict[str, Any]:
    """Gives everything that was found; speeds only up to a moment of time.perf_counter."""
    plan = SMALL if small else LARGE
    seconds = 0.01 if small else 0.5
    start = time.perf_counter()
    where = jax.devices(device)[0] if device else jax.devices()[0]
    found: dict[str, Any] = {"device": where.device_kind, "jax": jax.__version__, "kernels": {}}
    found["correct"], found["speed"], found["training"], found["skipped"] = {}, [], [], 0
    with jax.default_device(where):
        for mode in MODES:
            found["kernels"][mode] = what_ran(mode, plan["sizes"][-1])
            found["correct"][mode] = correctness(mode, plan["sizes"][0])
        for mode in (mode for mode in MODES if mode in ("float8", "float8/dynamic")):
            found["training"].append(training(mode, *plan["train"], seconds))
        for size in plan["sizes"]:
            policies = {mode: f"{mode}_from_mixed_bfloat16" for mode in MODES}
            calls = {
                mode: jitted(layer_of(size, size, policy))[0]
                for mode, policy in {"bfloat16": "bfloat16", **policies}.items()
            }
            for rows in plan["rows"]:
                x = jnp.asarray(inputs(rows, size)).astype(jnp.bfloat16)
                base = milliseconds(calls["bfloat16"], x, seconds)
                for mode in MODES:
                    if time.perf_counter() > deadline:
                        found["skipped"] += 1
                        continue
                    ours = milliseconds(calls[mode], x, seconds)
                    row = {"mode": mode, "size": size, "rows": rows, "bfloat16_ms": base}
                    found["speed"].append({**row, "ms": ours, "times_faster": base / ours})
    checks = [*found["correct"].values(), *found["training"]]
    found["right"] = all(check["right"] for check in checks)
    found["seconds"] = time.perf_counter() - start
    return found
