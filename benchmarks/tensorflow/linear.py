"""Times one linear layer of n by k under every policy, against TensorFlow's own and the raw kernel.

Every contender takes its turn in each round, so that a noisy moment of the machine falls on all of
them; a turn is up to 20 calls in a row, or one with --cold, when other contenders' weights have
taken the caches. The table has medians in microseconds. All are called through a `tf.function` with an unknown
batch size, except the raw kernel, one eager call, one under `jit_compile=True` and TFLite.

    python benchmarks/tensorflow/linear.py [--shape N K] [--rows M ...] [--rounds R] [--cold]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import policy_core as pc
import policy_kernels
import policy_tensorflow

Call = Callable[[tf.Tensor], object]

TURN_SECONDS = 0.05

POLICIES = (
    "int8_from_float32",
    "int8_from_mixed_bfloat16",
    "int8/weight_only_from_float32",
    "float8_from_float32",
    "float8/weight_only_from_float32",
)


def wrapped(n: int, k: int, policy: str) -> tf.Module:
    """Gives a linear layer under a policy, frozen."""
    return pc.freeze(pc.wrap(policy_tensorflow.Linear(k, n), policy))


def traced(layer: Callable[[tf.Tensor], tf.Tensor], k: int, dtype: tf.DType = tf.float32) -> Call:
    """Gives a layer as a function with an unknown batch size."""
    return tf.function(layer, input_signature=[tf.TensorSpec([None, k], dtype)])


def bfloat16(n: int, k: int) -> Call:
    """Gives TensorFlow's own product in bfloat16, of float32 rows."""
    weight = tf.cast(policy_tensorflow.Linear(k, n).weight, tf.bfloat16)
    bias = tf.zeros(n, tf.bfloat16)
    return traced(lambda x: tf.matmul(tf.cast(x, tf.bfloat16), weight) + bias, k)


def raw_kernel(n: int, k: int) -> Call:
    """Gives the int8 kernel as Python calls it, without TensorFlow."""
    weight = policy_kernels.pack(np.random.default_rng(0).integers(-127, 128, (n, k), np.int8))
    scale, bias = np.ones(n, np.float32), np.zeros(n, np.float32)
    return lambda x: policy_kernels.linear_s8(x.numpy(), weight, scale, bias)


def tflite(n: int, k: int, threads: int | None) -> Call:
    """Gives TFLite's dynamic range quantization of a linear layer: int8 weights, rows on the fly."""
    layer = policy_tensorflow.Linear(k, n)
    function = tf.function(layer, input_signature=[tf.TensorSpec([None, k])])
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [function.get_concrete_function()], layer
    )
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    interpreter = tf.lite.Interpreter(model_content=converter.convert(), num_threads=threads)
    into = interpreter.get_input_details()[0]["index"]
    out = interpreter.get_output_details()[0]["index"]
    rows = [0]

    def call(x: tf.Tensor) -> np.ndarray:
        if rows[0] != x.shape[0]:
            interpreter.resize_tensor_input(into, x.shape)
            interpreter.allocate_tensors()
            rows[0] = x.shape[0]
        interpreter.set_tensor(into, x)
        interpreter.invoke()
        return interpreter.get_tensor(out)

    return call


def contenders(n: int, k: int, skip: list[str]) -> dict[str, Call]:
    """Gives what is timed, by name."""
    threads = policy_kernels.num_threads() if policy_kernels.available() else None
    makers: dict[str, Callable[[], Call]] = {
        "tf float32": lambda: traced(policy_tensorflow.Linear(k, n), k),
        "tf bfloat16": lambda: bfloat16(n, k),
        "TFLite int8": lambda: tflite(n, k, threads),
    }
    if policy_kernels.available():
        makers["raw int8 kernel"] = lambda: raw_kernel(n, k)
    for policy in POLICIES:
        makers[policy] = lambda policy=policy: traced(wrapped(n, k, policy), k)
    makers["int8, eager"] = lambda: wrapped(n, k, POLICIES[0])
    makers["int8, jit_compile"] = lambda: tf.function(wrapped(n, k, POLICIES[0]), jit_compile=True)
    return {name: make() for name, make in makers.items() if name not in skip}


def turn(call: Call, x: tf.Tensor, cold: bool) -> list[float]:
    """Gives the times of one turn: up to 20 calls in a row, or one."""
    times: list[float] = []
    while len(times) < (1 if cold else 20) and sum(times) < TURN_SECONDS:
        start = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - start)
    return times


def measure(calls: dict[str, Call], x: tf.Tensor, rounds: int, cold: bool) -> dict[str, float]:
    """Gives the median time in microseconds of each call."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(x)
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name] += turn(call, x, cold)
    return {name: statistics.median(times) * 1e6 for name, times in taken.items()}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512], metavar="M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="one call in each turn")
    parser.add_argument("--skip", nargs="*", default=[], help="names of contenders to leave out")
    given = parser.parse_args()
    n, k = given.shape
    calls = contenders(n, k, given.skip)
    kernel = policy_kernels.kernel_name("linear_s8") if policy_kernels.available() else "none"
    print(f"{os.cpu_count()} CPUs, tensorflow {tf.__version__}, kernel {kernel}; microseconds")
    times = {}
    for m in given.rows:
        x = tf.constant(np.random.default_rng(m).standard_normal((m, k), np.float32))
        times[m] = measure(calls, x, given.rounds, given.cold)
    width = max(map(len, calls))
    print(f"\n{f'{n} x {k}':<{width}} " + " ".join(f"{f'M = {m}':>9}" for m in times))
    for name in calls:
        print(f"{name:<{width}} " + " ".join(f"{of[name]:>9.0f}" for of in times.values()))


if __name__ == "__main__":
    main()
