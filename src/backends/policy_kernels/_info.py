"""The ``policy-core info`` command: what the kernels are on this machine."""

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ._loader import build_info


def cpu_name() -> str:
    """The CPU's model name, or its architecture where the system tells no more."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def facts() -> dict[str, str | int | bool | list[str] | None]:
    """What the command prints, as JSON types."""
    info = build_info()
    return {
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "kernels": info.built,
        "reason": info.reason,
        "library": None if info.library is None else str(info.library),
        "abi_version": info.abi_version,
        "compiler": info.compiler,
        "compiled_isas": list(info.compiled_isas),
        "present_isas": list(info.present_isas),
        "isa": info.isa,
        "amx_permission": info.amx_permission,
        "threads": info.threads,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _text(value: str | int | bool | list[str] | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the CPU, the native library and its instruction sets.

    Args:
        argv: the command's arguments; None for those of the process.

    Returns:
        0, also where the kernels were not built.
    """
    parser = argparse.ArgumentParser(
        prog="policy-core info", description="Show the CPU and the kernels in use."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    found = facts()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        for key, value in found.items():
            print(f"{key:<{width}}  {_text(value)}")
    return 0
