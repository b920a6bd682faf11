"""Check what a wheel would put into site-packages.

Usage: wheel_contents.py WHEEL [--library]; with --library the native library must be in it, without
it must not.
"""

import argparse
import sys
import zipfile
from pathlib import PurePosixPath

PACKAGES = {
    "policy_core",
    "policy_jax",
    "policy_keras",
    "policy_kernels",
    "policy_numpy",
    "policy_tensorflow",
    "policy_torch",
}
LIBRARIES = ("policy_jax", "policy_kernels", "policy_tensorflow", "policy_torch")


def problems(names: list[str], library: bool) -> list[str]:
    """What is wrong with a wheel that holds files of these names; empty where nothing is."""
    found = []
    top = {PurePosixPath(name).parts[0] for name in names}
    packages = {name for name in top if not name.endswith(".dist-info")}
    if packages != PACKAGES:
        found.append(f"expected the packages {sorted(PACKAGES)}, got {sorted(packages)}")
    if len(top - packages) != 1:
        found.append(f"expected one .dist-info folder, got {sorted(top - packages)}")
    found += [f"expected no C++ source, got {name}" for name in names if "/csrc/" in name]
    found += [
        f"expected {package}/py.typed"
        for package in sorted(PACKAGES)
        if f"{package}/py.typed" not in names
    ]
    libraries = [name for name in names if name.endswith(".so")]
    wanted = [f"{name}/lib{name}.so" for name in LIBRARIES] if library else []
    if sorted(libraries) != wanted:
        found.append(f"expected the libraries {wanted}, got {libraries}")
    if not any(
        name.startswith("policy_numpy/") and name.endswith(".safetensors") for name in names
    ):
        found.append("expected the demo's .safetensors file in policy_numpy, got none")
    return found


def main() -> int:
    """Print the problems of the wheel named on the command line; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel")
    parser.add_argument("--library", action="store_true")
    arguments = parser.parse_args()
    with zipfile.ZipFile(arguments.wheel) as archive:
        found = problems(archive.namelist(), arguments.library)
    for problem in found:
        print(f"{arguments.wheel}: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
