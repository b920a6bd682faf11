"""The device check runs on a CPU too, and finds everything right."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_check.py"


def test_device_check_on_a_cpu() -> None:
    """With small sizes the script ends well, and prints JSON with a row for each mode and size."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--small"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["right"]
    assert len(found["kernels"]) == 5
    assert len(found["speed"]) == 10
    assert [row["mode"] for row in found["training"]] == ["float8", "float8/dynamic"]
