"""Measures what `import policy_core` costs beyond `import numpy`, and what it brings in.

    python benchmarks/import_time.py

Each round starts a new interpreter with its files in the page cache; the median is printed.
"""

import json
import statistics
import subprocess
import sys

ROUNDS = 21
PROBE = """
import json, sys, time
import numpy
before, start = set(sys.modules), time.perf_counter()
import policy_core
taken = time.perf_counter() - start
new = set(sys.modules) - before
found = sorted({"torch", "jax", "tensorflow", "keras"} & set(sys.modules))
print(json.dumps({"ms": taken * 1000, "modules": len(new), "frameworks": found}))
"""


def main() -> None:
    """Prints one line of JSON."""
    rounds = []
    for _ in range(ROUNDS + 1):
        run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True)
        rounds.append(json.loads(run.stdout))
    # The first round fills the page cache.
    times = [found["ms"] for found in rounds[1:]]
    result = {
        "rounds": ROUNDS,
        "median_ms": round(statistics.median(times), 1),
        "min_ms": round(min(times), 1),
        "max_ms": round(max(times), 1),
        "modules": rounds[-1]["modules"],
        "frameworks": rounds[-1]["frameworks"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
