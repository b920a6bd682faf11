"""The example and the benchmark do what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    # A process of its own: the example's optimizer is one of Keras, which fixes its backend.
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_quickstart() -> None:
    """All forms of the transformer learn, and end within 2 % of float32's loss."""
    example = ROOT / "examples" / "tensorflow_quickstart.py"
    code = f"import json, runpy; m = runpy.run_path({str(example)!r}); print(json.dumps(m['main'](25)))"
    losses = json.loads(run("-c", code).splitlines()[-1])
    assert losses["float32"] < 4
    for name, loss in losses.items():
        assert abs(loss - losses["float32"]) <= 0.02 * losses["float32"], name


def test_benchmark() -> None:
    """The benchmark times every contender, by name."""
    script = ROOT / "benchmarks" / "tensorflow" / "linear.py"
    printed = run(str(script), "--shape", "64", "96", "--rows", "1", "3", "--rounds", "1")
    lines = printed.splitlines()
    for name in ("64 x 96", "tf float32", "TFLite int8", "int8_from_float32", "int8, jit_compile"):
        line = next(line for line in lines if line.startswith(f"{name} "))
        assert len(line.removeprefix(name).replace("M = ", "").split()) == 2
