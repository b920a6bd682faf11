"""A wrapped Keras Dense beside Keras's own forms of it, on each framework that Keras runs on.

    python benchmarks/keras/dense.py [--backend torch jax tensorflow] [--shape N K] [--rows M ...]
        [--rounds 5] [--json FILE]

Each framework has a process of its own. In it every contender takes its turn in each round, so that
a noisy moment of the machine falls on all of them; the first call of a turn is not counted. A time
is the median of all counted calls, in milliseconds: through tf.function on TensorFlow, jax.jit on
JAX, and eager without gradients on torch. `ratio` is a contender's median over that of the same
Dense wrapped in int8_from_float32. On TensorFlow TFLite's dynamic-range int8 takes part.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLICIES = (
    "int8_from_float32",
    "int8_from_mixed_bfloat16",
    "int8/weight_only_from_float32",
    "float8_from_float32",
    "float8/weight_only_from_float32",
)
TURN_SECONDS = 0.05
MOST_CALLS = 20

Bind = Callable[[Any], Callable[[], Any]]
"""From a numpy array to a call with it, in the framework's form already."""


def dense(n: int, k: int, dtype: str = "float32") -> Any:
    """Gives a plain Dense, the same for all contenders."""
    import keras

    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(n, dtype=dtype)
    layer.build((None, k))
    return layer


def layers(n: int, k: int) -> dict[str, Any]:
    """Gives the layers that are compared, by name."""
    import policy_core as pc

    made = {"keras float32": dense(n, k), "keras mixed_bfloat16": dense(n, k, "mixed_bfloat16")}
    for mode in ("int8", "float8"):
        made[f"keras {mode}"] = dense(n, k)
        made[f"keras {mode}"].quantize(mode)
    made |= {policy: pc.freeze(pc.wrap(dense(n, k), policy)) for policy in POLICIES}
    return made


def on_torch(layer: Any) -> Bind:
    """Gives an eager call without gradients."""
    import torch

    def bind(x: Any) -> Callable[[], Any]:
        tensor = torch.from_numpy(x)

        def call() -> Any:
            with torch.no_grad():
                return layer(tensor)

        return call

    return bind


def on_jax(layer: Any) -> Bind:
    """Gives a jitted call, the variables its arguments."""
    import jax

    trainable = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]
    call = jax.jit(lambda t, o, x: layer.stateless_call(t, o, x)[0])

    def bind(x: Any) -> Callable[[], Any]:
        array = jax.numpy.asarray(x)
        return lambda: jax.block_until_ready(call(trainable, others, array))

    return bind


def on_tensorflow(layer: Any) -> Bind:
    """Gives a call through tf.function."""
    import tensorflow as tf

    call = tf.function(layer, reduce_retracing=True)

    def bind(x: Any) -> Callable[[], Any]:
        tensor = tf.constant(x)
        return lambda: call(tensor)

    return bind


def tflite(n: int, k: int, m: int) -> Bind:
    """Gives TFLite's dynamic-range int8 of the same Dense, for one number of rows."""
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((k,)), dense(n, k)])
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    # It prints where it saves the model on the way.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        content = converter.convert()
        interpreter = tf.lite.Interpreter(model_content=content, num_threads=os.cpu_count() or 1)
    # A byte a weight: some ways to convert keep the weights as floats, silently.
    assert n * k < len(content) < 2 * n * k, len(content)
    into = interpreter.get_input_details()[0]["index"]
    out = interpreter.get_output_details()[0]["index"]
    interpreter.resize_tensor_input(into, (m, k))
    interpreter.allocate_tensors()

    def bind(x: Any) -> Callable[[], Any]:
        def call() -> Any:
            interpreter.set_tensor(into, x)
            interpreter.invoke()
            return interpreter.get_tensor(out)

        return call

    return bind


def measure(binds: dict[str, Bind], x: Any, rounds: int) -> dict[str, float]:
    """Gives the median time of each call in milliseconds."""
    calls = {name: bind(x) for name, bind in binds.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            end = time.perf_counter() + TURN_SECONDS
            for _ in range(MOST_CALLS):
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                taken[name].append(now - start)
                if now > end:
                    break
    return {name: statistics.median(times) * 1e3 for name, times in taken.items()}


def run(backend: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures in this process, and prints a table."""
    import keras
    import numpy as np

    import policy_kernels

    assert keras.config.backend() == backend
    n, k = given.shape
    compiled = {"torch": on_torch, "jax": on_jax, "tensorflow": on_tensorflow}[backend]
    calls: dict[str, Bind] = {name: compiled(layer) for name, layer in layers(n, k).items()}
    kernel = policy_kernels.kernel_name("linear_s8") if policy_kernels.available() else "none"
    print(f"\nKeras {keras.__version__} on {backend}, {n} x {k}, {os.cpu_count()} CPUs, {kernel}")
    rows = []
    for m in given.rows:
        x = np.random.default_rng(m).standard_normal((m, k), np.float32)
        if backend == "tensorflow":
            calls["tflite int8"] = tflite(n, k, m)
        times = measure(calls, x, given.rounds)
        print(f"  M = {m}")
        for name, milliseconds in times.items():
            ratio = milliseconds / times["int8_from_float32"]
            print(f"    {name:32} {milliseconds:10.3f} ms   ratio {ratio:8.2f}", flush=True)
            rows.append({"backend": backend, "m": m, "name": name, "ms": milliseconds})
    return rows


def main() -> None:
    """Runs a process for each framework, or measures where one was chosen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", nargs="+", default=["torch", "jax", "tensorflow"])
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512], metavar="M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write every median")
    given = parser.parse_args()
    chosen = os.environ.get("KERAS_BACKEND")
    if len(given.backend) == 1 and given.backend[0] == chosen:
        rows = run(chosen, given)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
        return
    everything = []
    for backend in given.backend:
        part = None if given.json is None else given.json.with_suffix(f".{backend}.json")
        command = [sys.executable, __file__, "--backend", backend, "--rounds", str(given.rounds)]
        command += ["--shape", *map(str, given.shape), "--rows", *map(str, given.rows)]
        command += [] if part is None else ["--json", str(part)]
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, env=environment, check=True)
        if part is not None:
            everything += json.loads(part.read_text())
            part.unlink()
    if given.json:
        given.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
