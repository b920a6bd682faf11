"""Wrapped models on several devices: `distribution_<framework>.py`, in processes of their own.

Devices are fixed before a framework starts, and would change what the other checks see.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import keras

BACKEND = keras.config.backend()
SCRIPT = Path(__file__).with_name(f"distribution_{BACKEND}.py")
PYTEST = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]


def finished(started):
    """Gives what processes have printed, or raises AssertionError with it."""
    try:
        printed = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(printed)
    return printed


def start(arguments, **environment):
    environment = {**os.environ, "KERAS_BACKEND": BACKEND, **environment}
    return subprocess.Popen(
        [sys.executable, *arguments, str(SCRIPT)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_several_devices():
    """Every claim of the framework's own file holds: on two replicas, or on eight devices."""
    if BACKEND != "torch":
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        (printed,) = finished([start(PYTEST, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")])
        assert " passed" in printed
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    finished([start([], RANK=str(rank), WORLD_SIZE="2", **address) for rank in range(2)])
