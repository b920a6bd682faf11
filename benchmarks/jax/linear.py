"""Times linear layers, jitted, under every policy, against flax, qwix, Keras and the raw kernel.

Contenders take turns, so that a noisy moment of the machine falls on all of them. A turn is some
calls in a row after one that is not counted, as in a loop over one layer. With --cold it is one
call, right after the other contenders' weights went through the caches, as in a model of many
layers: at few rows that is the time to read the weight from memory. The table has medians in
microseconds. Inputs are float32, for contenders with bfloat16 in their names bfloat16. qwix and
Keras take part where they are installed.

    python benchmarks/jax/linear.py [--shapes NxK ...] [--rows M ...] [--rounds R] [--cold]
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import policy_core as pc
import policy_kernels

POLICIES = (
    "int8_from_float32",
    "int8_from_mixed_bfloat16",
    "int8/weight_only_from_float32",
    "float8_from_float32",
    "float8/dynamic_from_float32",
    "float8/weight_only_from_float32",
)
SHAPES = [(4096, 4096), (768, 768), (3072, 768), (768, 3072)]
TURN_SECONDS = 0.1


def wrapped(n: int, k: int, policy: str) -> Callable[[jax.Array], jax.Array]:
    """Gives a jitted nnx.Linear under a policy, frozen, its state passed as an argument."""
    layer = pc.freeze(pc.wrap(nnx.Linear(k, n, rngs=nnx.Rngs(0)), policy))
    layer.eval()
    return jitted(layer)


def jitted(layer: nnx.Module) -> Callable[[jax.Array], jax.Array]:
    """Gives a jitted call, without nnx's own work for each call, which is the same for all."""
    graph, state = nnx.split(layer)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return lambda x: call(state, x)


def raw_kernel(n: int, k: int) -> Callable[[jax.Array], np.ndarray]:
    """Gives the int8 kernel as Python calls it, without JAX."""
    weight = policy_kernels.pack(np.random.default_rng(0).integers(-127, 128, (n, k), np.int8))
    scale, bias = np.ones(n, np.float32), np.zeros(n, np.float32)
    # jax keeps what np.asarray gives: no copy is timed.
    return lambda x: policy_kernels.linear_s8(np.asarray(x), weight, scale, bias)


def contenders(n: int, k: int) -> dict[str, Callable[[jax.Array], object]]:
    """Gives what is timed, by name."""
    made: dict[str, Callable[[jax.Array], object]] = {
        "flax float32": jitted(nnx.Linear(k, n, rngs=nnx.Rngs(0))),
        "flax bfloat16": jitted(
            nnx.Linear(k, n, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        ),
    }
    if policy_kernels.available():
        made["raw int8 kernel"] = raw_kernel(n, k)
    made |= {policy: wrapped(n, k, policy) for policy in POLICIES}
    if importlib.util.find_spec("keras"):
        made["Keras int8"] = keras_int8(n, k)
    if importlib.util.find_spec("qwix"):
        made["qwix int8"] = qwix_int8(n, k)
    return made


def keras_int8(n: int, k: int) -> Callable[[jax.Array], object]:
    """Gives Keras's own int8 Dense on JAX, jitted."""
    import keras

    layer = keras.layers.Dense(n)
    layer.build((None, k))
    layer.quantize("int8")
    values = [v.value for v in layer.non_trainable_variables]
    trainable = [v.value for v in layer.trainable_variables]
    call = jax.jit(lambda t, v, x: layer.stateless_call(t, v, x)[0])
    return lambda x: call(trainable, values, x)


def qwix_int8(n: int, k: int) -> Callable[[jax.Array], object]:
    """Gives qwix's post-training int8 of an nnx.Linear, jitted."""
    import qwix

    rule = qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    layer = nnx.Linear(k, n, rngs=nnx.Rngs(0))
    layer = qwix.quantize_model(layer, qwix.PtqProvider([rule]), jnp.ones((1, k)))
    return jitted(layer)


def turn(call: Callable[[jax.Array], object], x: jax.Array, cold: bool) -> list[float]:
    """Gives the times in seconds of some calls in a row, of one if `cold`."""
    if not cold:
        jax.block_until_ready(call(x))
    times: list[float] = []
    while len(times) < (1 if cold else 20) and sum(times) < TURN_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(call(x))
        times.append(time.perf_counter() - start)
    return times


def measure(
    calls: dict[str, Callable[[jax.Array], object]], x: jax.Array, rounds: int, cold: bool
) -> dict[str, float]:
    """Gives the median time in microseconds of each call."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    inputs = {name: x.astype("bfloat16") if "bfloat16" in name else x for name in calls}
    for name, call in calls.items():
        jax.block_until_ready(call(inputs[name]))
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name] += turn(call, inputs[name], cold)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def size(text: str) -> tuple[int, int]:
    """Reads `NxK`."""
    n, k = text.split("x")
    return int(n), int(k)


def main() -> None:
    """Prints a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=size, nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512], metavar="M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="one call in each turn")
    parser.add_argument("--skip", nargs="*", default=[], help="names of contenders to leave out")
    given = parser.parse_args()
    kernel = policy_kernels.kernel_name("linear_s8") if policy_kernels.available() else "none"
    print(f"{os.cpu_count()} CPUs, jax {jax.__version__}, kernel {kernel}; microseconds")
    for n, k in given.shapes:
        calls = {name: call for name, call in contenders(n, k).items() if name not in given.skip}
        width = max(map(len, calls))
        times = {}
        for m in given.rows:
            x = jnp.asarray(np.random.default_rng(m).standard_normal((m, k), np.float32))
            times[m] = measure(calls, x, given.rounds, given.cold)
        print(f"\n{f'{n} x {k}':<{width}} " + " ".join(f"{f'M = {m}':>9}" for m in times))
        for name in calls:
            print(f"{name:<{width}} " + " ".join(f"{of[name]:>9.0f}" for of in times.values()))
        print(flush=True)


if __name__ == "__main__":
    main()
