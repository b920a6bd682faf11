"""Path patterns: Python's regular expressions, matched in bounded time whatever the pattern.

A pattern may come from a file, and Python's matcher takes exponential time, or all memory, for
some. Where it provably takes few steps it is used, elsewhere `_position_sets.py`. Both answer
the same question, `re.fullmatch(pattern, path)`.
"""

import functools
import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]  # re's own parse tree
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ._dtypes import shorten
from ._position_sets import Ends, UnboundedError, follow, sequence

MAX_PATTERN = 1000
"""Longest pattern, in characters."""
MAX_PATH = 1000
"""Longest path, in characters."""

# Python's own limit is the process's to change.
_MAX_NESTING = 100
# Under 10 ms on one core of 2 GHz, for the slowest patterns of the tests.
_MAX_STEPS = 500_000


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Gives a function that says whether a whole path matches the pattern.

    Args:
        pattern: A regular expression of Python's `re`, at most 1,000 characters.

    Returns:
        A function of a path of at most 1,000 characters; it raises ValueError for a longer one,
        and where the pattern would take too long on this path.

    Raises:
        ValueError: The pattern is too long, malformed, or would take too long on every path
            because of what can be matched only by trying (flags, back references, look-behind).

    >>> matches = compile_pattern("encoder/.*")
    >>> matches("encoder/0/dense"), matches("my_encoder/0")
    (True, False)
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(
            f"A pattern may have {MAX_PATTERN} characters; {shorten(pattern)} is longer."
        )

    def too_complex(reason: str) -> ValueError:
        return ValueError(
            f"Pattern {shorten(pattern)} could take unbounded time, because of its {reason}. "
            "Write it with fewer or simpler repeats, or without that."
        )

    ends: Ends | None = None
    reason = "flags"
    try:
        tree = _parser.parse(pattern)
        compiled = re.compile(pattern)
        longest = _longest_for_re(tree)
        if not compiled.flags & ~re.UNICODE:
            ends = sequence(tree)
    except UnboundedError as error:
        reason = str(error)
    except (re.error, OverflowError) as error:
        raise ValueError(f"{shorten(pattern)} is not a valid pattern: {error}") from None
    except RecursionError:
        raise too_complex("nesting") from None
    if ends is None and longest < 0:
        raise too_complex(reason)

    def matches(path: str) -> bool:
        if len(path) > MAX_PATH:
            raise ValueError(f"A path may have {MAX_PATH} characters; {shorten(path)} is longer.")
        if len(path) <= longest:
            return compiled.fullmatch(path) is not None
        if ends is None:
            raise too_complex(reason)
        try:
            return follow(ends, path)
        except (UnboundedError, RecursionError):
            raise too_complex("nested repeats") from None

    return matches


def _longest_for_re(tree: Any) -> int:
    """Gives the length of path up to which `re` takes few steps; -1 if there is none."""
    for length in (MAX_PATH, 300, 100, 30):
        if _effort(tree, length)[1] <= _MAX_STEPS:
            return length
    return -1


_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_MANY = float("inf")


def _effort(nodes: Any, length: int, depth: int = 0) -> tuple[float, float]:
    """Bounds the ways in which `re` can get past some nodes, and its steps for all of them."""
    if depth > _MAX_NESTING:
        raise RecursionError
    ways, steps = 1.0, 1.0
    for op, argument in nodes:
        more_ways, more_steps = _effort_of(op, argument, length, depth + 1)
        # All that follows a choice is tried anew for each of its ways.
        steps += ways * more_steps
        ways *= more_ways
    return ways, steps


def _effort_of(op: Any, argument: Any, length: int, depth: int) -> tuple[float, float]:
    if op in _REPEATS:
        low, high, body = argument
        ways, steps = _effort(body, length, depth)
        if high <= 1:
            return (ways + (high - low), steps)
        if ways > 1:  # the ways multiply in each round
            return (_MANY, _MANY)
        # A round that consumes nothing is the last, unless fewer than `low` have been.
        return (1.0 + min(high - low, length), steps * min(high, max(low, length + 1)))
    if op is sre.SUBPATTERN:
        return _effort(argument[-1], length, depth)
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return (1.0, _effort(argument[1], length, depth)[1])
    if op is sre.ATOMIC_GROUP:
        return (1.0, _effort(argument, length, depth)[1])
    if op in (sre.BRANCH, sre.GROUPREF_EXISTS):
        bodies = argument[1] if op is sre.BRANCH else argument[1:]
        efforts = [_effort(body or (), length, depth) for body in bodies]
        return (sum(ways for ways, _ in efforts), sum(steps for _, steps in efforts))
    if op is sre.GROUPREF:
        return (1.0, 1.0 + length)
    return (1.0, float(len(argument)) if op is sre.IN else 1.0)
