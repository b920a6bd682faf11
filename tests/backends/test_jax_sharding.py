"""Sharded weights and batches, on 8 virtual CPU devices, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def test_sharded_products_are_right_and_stay_sharded():
    """GSPMD and shard_map give the reference's numbers, without gathering batch or weights."""
    script = Path(__file__).with_name("jax_sharding_process.py")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
