"""The Keras backend on each framework that Keras runs on, each in a process of its own.

`KERAS_BACKEND` is fixed when Keras is imported, so pytest runs for each framework over the files of
`keras_checks`, and each file's outcome is one test here. To run one by hand:

    KERAS_BACKEND=jax python -m pytest tests/backends/keras_checks/check_layers.py
"""

import functools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("keras")
FOLDER = Path(__file__).with_name("keras_checks")
FILES = sorted(path.stem for path in FOLDER.glob("check_*.py"))
BACKENDS = ("torch", "jax", "tensorflow")
# Two processes for each framework, so that neither takes minutes: the contract, and all else.
GROUPS = (("check_contract",), tuple(name for name in FILES if name != "check_contract"))


def outcomes(backend, files, folder):
    """Gives the test cases of a run over files, by file: name, and text of what failed."""
    report = Path(folder) / f"{files[0]}.xml"
    paths = [str(FOLDER / f"{name}.py") for name in files]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Small products: more threads would only wait for each other.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "POLICY_NUM_THREADS"), "1")
    chosen = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {**os.environ, **threads, **chosen}
    environment.pop("POLICY_BACKEND", None)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        env=environment,
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    found = {name: [] for name in files}
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    for case in cases:
        # What cannot be imported has its name where others have the class's.
        file = re.search(r"check_\w+", f"{case.get('classname')} {case.get('name')}").group()
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        found[file].append((case.get("name"), "" if failure is None else failure.text))
    return found, ran.stdout[-3000:] + ran.stderr[-3000:]


@functools.cache
def runs(backend, folder):
    """Starts the processes for a framework beside each other, and gives their futures by file."""
    pool = ThreadPoolExecutor(len(GROUPS))
    futures = {group: pool.submit(outcomes, backend, group, folder) for group in GROUPS}
    return {file: future for group, future in futures.items() for file in group}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keras(backend, file, tmp_path_factory):
    """Every check of a file holds on every framework that is installed."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    folder = tmp_path_factory.getbasetemp() / f"keras-{backend}"
    folder.mkdir(exist_ok=True)
    found, output = runs(backend, folder)[file].result()
    assert found[file], f"no test of {file} ran on {backend}:\n{output}"
    failed = [f"{name}\n{text}" for name, text in found[file] if text]
    assert not failed, f"on {backend}:\n" + "\n\n".join(failed)
