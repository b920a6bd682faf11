"""The device check and the benchmarks run on a CPU too."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_device_check_on_a_cpu() -> None:
    """With small sizes the script ends well, and prints JSON with a row for each mode and size."""
    done = run("device_check.py", "--framework", "torch", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["right"]
    assert len(found["kernels"]) == 5
    assert len(found["speed"]) == 10
    assert [row["mode"] for row in found["training"]] == ["float8", "float8/dynamic"]


def test_benchmark_of_layers() -> None:
    """The benchmark names every contender and its time, and writes them to a file."""
    done = run("torch/bench_linear.py", "--small", "--rounds", "1", "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("quantize_dynamic", "int8_from_float32", "training step", "encoder of two"):
        assert name in done.stdout
