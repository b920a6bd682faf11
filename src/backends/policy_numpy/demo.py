"""`policy-core demo`: a real model on real images under several policies, in one table."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence as Strings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import policy_core as pc

from ._models import Sequential
from ._ops import Array
from .digits import load_images, trained_model

POLICIES: tuple[tuple[str, Any], ...] = (
    ("float32", "float32"),
    ("mixed_bfloat16", "mixed_bfloat16"),
    ("int8_from_float32", "int8_from_float32"),
    ("float8_from_float32", "float8_from_float32"),
    (
        "map: 0 and 1 int8, 2 float32",
        {"[01]": "int8_from_float32", "2": "float32"},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one policy did to the model.

    Attributes:
        policy: The policy, or what a map says.
        weight_bytes: What all tensors of the model take.
        accuracy: The share of held-out images that are classified right.
        agreement: The share of held-out images that are classified as under float32.
        milliseconds: The median time for all held-out images as one batch.
        kernels: The routines that multiply, in the layers' order, each once.
        notes: What the report says about them, each once.
    """

    policy: str
    weight_bytes: int
    accuracy: float
    agreement: float
    milliseconds: float
    kernels: tuple[str, ...]
    notes: tuple[str, ...]


def run(rounds: int, advance: Any = lambda: None) -> list[Result]:
    """Gives a result for each policy.

    Args:
        rounds: How many times each model is timed; the policies take turns, so that a noisy
            moment of the machine falls on all of them.
        advance: Called after each of the `(rounds + 1) * len(POLICIES)` batches.
    """
    _, _, images, labels = load_images()
    models: list[Sequential] = []
    guesses: list[Array] = []
    for _, policy in POLICIES:
        # Frozen: float8's training form keeps the float weights too.
        model = pc.freeze(pc.wrap(trained_model(), policy))
        models.append(model)
        guesses.append(model(images).argmax(1))
        advance()
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model(images)
            taken.append(time.perf_counter() - start)
            advance()
    return [
        _result(name, model, guess, labels, guesses[0], taken)
        for (name, _), model, guess, taken in zip(POLICIES, models, guesses, times, strict=True)
    ]


def _result(
    name: str, model: Sequential, guess: Array, labels: Array, reference: Array, taken: list[float]
) -> Result:
    report = pc.report(model)
    return Result(
        policy=name,
        weight_bytes=report.bytes_after,
        accuracy=float(np.mean(guess == labels)),
        agreement=float(np.mean(guess == reference)),
        milliseconds=statistics.median(taken) * 1000,
        kernels=tuple(dict.fromkeys(row.kernel for row in report.rows)),
        notes=tuple(dict.fromkeys(row.note for row in report.rows if row.note)),
    )


def main(argv: Strings[str]) -> int:
    """Runs the demo and prints its table; gives the exit status.

    Args:
        argv: The arguments after `policy-core demo`.
    """
    parser = argparse.ArgumentParser(
        prog="policy-core demo",
        description="Classifies scikit-learn's held-out digits under several policies.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=11, help="timings of each policy")
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {given.rounds}")
    try:
        results = _run_with_progress(given.rounds)
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _print_table(results)
    return 0


def _run_with_progress(rounds: int) -> list[Result]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("classifying", total=(rounds + 1) * len(POLICIES))
        return run(rounds, lambda: progress.advance(task))


def _print_table(results: list[Result]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for name in ("bytes of weights", "accuracy", "as float32", "ms a batch"):
        table.add_column(name, justify="right")
    table.add_column("kernel")
    for result in results:
        table.add_row(
            result.policy,
            f"{result.weight_bytes:,}",
            f"{result.accuracy:.2%}",
            f"{result.agreement:.2%}",
            f"{result.milliseconds:.2f}",
            ", ".join(result.kernels),
        )
    console = Console()
    if not console.is_terminal:
        # A pipe or a file has no width; 80 would cut the names.
        console = Console(width=120)
    console.print("A multilayer perceptron of 301,066 parameters on 360 held-out digits:")
    console.print(table)
    for note in dict.fromkeys(note for result in results for note in result.notes):
        console.print(f"note: {note}", highlight=False)
