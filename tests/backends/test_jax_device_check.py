"""The device check covers JAX, and runs on a CPU too."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/device_check.py"
MODES = ["int8", "int8/weight_only", "float8", "float8/dynamic", "float8/weight_only"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--small", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_device_check_on_a_cpu() -> None:
    """With small sizes it ends well, and prints JSON with a row for each mode and size."""
    done = run("--framework", "jax", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["right"]
    assert list(found["kernels"]) == MODES
    assert len(found["speed"]) == 10
    assert found["skipped"] == 0
    assert [row["mode"] for row in found["training"]] == ["float8", "float8/dynamic"]
    for ran in found["kernels"].values():
        # What the report names is what the compiled program has.
        native = not ran["kernel"].endswith("_xla")
        assert native == ("policy_jax_linear" in ran["compiled"])


def test_what_there_is_no_time_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time is over no more speeds are measured, and their number is told."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    part = importlib.import_module("device_check_jax")
    monkeypatch.setattr(part, "MODES", ("int8",))
    found = part.check("cpu", small=True, deadline=0.0)
    assert found["right"]
    assert (found["speed"], found["skipped"]) == ([], 2)


def test_a_framework_that_is_unknown_is_refused() -> None:
    """The frameworks that there are stand in the error."""
    done = run("--framework", "mxnet")
    assert done.returncode == 2
    assert "'torch', 'jax'" in done.stderr
