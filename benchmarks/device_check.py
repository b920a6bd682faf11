"""Checks int8 and float8 on this machine's device against bfloat16: python benchmarks/device_check.py

Prints one JSON object: for each framework which kernels ran, whether results are right, and how
long they take. Takes less than 8 minutes: what there is no time for is counted as skipped. Ends
with 1 if a result is wrong. `--small` suits a CPU.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
from typing import Any

FRAMEWORKS = ("torch", "jax")


def main() -> int:
    """Runs the checks, prints what they found, and gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=(*FRAMEWORKS, "all"), default="all")
    parser.add_argument("--device", help="such as cpu or cuda; the framework's default without it")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--minutes", type=float, default=7, help="when to stop timing")
    options = parser.parse_args()
    one = options.framework != "all"
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name)]
    chosen = [options.framework] if one else installed
    begin = time.perf_counter()
    found: dict[str, Any] = {}
    for i, name in enumerate(chosen):
        deadline = begin + options.minutes * 60 * (i + 1) / len(chosen)
        part = importlib.import_module(f"device_check_{name}")
        found[name] = part.check(options.device, options.small, deadline)
    right = bool(found) and all(part["right"] for part in found.values())
    print(json.dumps(found[options.framework] if one else {**found, "right": right}, indent=1))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
