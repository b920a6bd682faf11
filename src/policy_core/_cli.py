"""The `policy-core` command: its sub-commands are entry points, as the backends are."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version

GROUP = "policy_core.commands"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and gives its exit status.

    Args:
        argv: The arguments after the program's name; None takes those of the process.
    """
    commands = {point.name: point for point in sorted(entry_points(group=GROUP))}
    parser = argparse.ArgumentParser(
        prog="policy-core", description="Dtype policies and quantization for any framework."
    )
    parser.add_argument("--version", action="version", version=version("policy-core"))
    parser.add_argument("command", choices=commands, help="what to run; --help after it says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the command takes")
    given = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        status: int = commands[given.command].load()(given.arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has enough; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
