"""What the tests of the core share."""

import os
import subprocess
import sys

import pytest

from policy_core import _registry


@pytest.fixture(scope="session")
def run_python():
    """A function that runs code in a fresh interpreter and gives what it printed."""

    def run(code: str, stdin: str = "", **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=stdin,
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def registry(monkeypatch):
    """What the test registers is forgotten after it."""
    monkeypatch.setattr(_registry, "_objects", dict(_registry._objects))
    monkeypatch.setattr(_registry, "_names", dict(_registry._names))
