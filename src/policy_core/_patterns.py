"""Path patterns: Python's regular expressions, matched in bounded time whatever the pattern.

A pattern may come from a file, and Python's matcher takes exponential time for some. Where it
provably takes few steps it is used. Elsewhere the pattern is matched here, by following the set
of positions that each part of it can reach, in time proportional to the pattern's length times
the square of the path's. Both answer the same question, `re.fullmatch(pattern, path)`.
"""

import functools
import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]  # re's own parse tree
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from ._dtypes import shorten

MAX_PATTERN = 1000
"""Longest pattern, in characters."""
MAX_PATH = 1000
"""Longest path, in characters."""
_MAX_STEPS = 1_000_000


class _Run(NamedTuple):
    """One match of one path: what each part reaches from each position, computed once."""

    path: str
    known: dict[tuple[int, int], frozenset[int]]


_Ends = Callable[[_Run, int], frozenset[int]]


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Gives a function that says whether a whole path matches the pattern.

    Args:
        pattern: A regular expression of Python's `re`, at most 1,000 characters.

    Returns:
        A function of a path of at most 1,000 characters; it raises ValueError for a longer one,
        and where the pattern would take too long on this path and has flags or back references.

    Raises:
        ValueError: The pattern is too long, malformed, or nests repeats around what cannot be
            matched in bounded time (back references, conditionals, look-behind, inline flags).

    >>> matches = compile_pattern("encoder/.*")
    >>> matches("encoder/0/dense"), matches("my_encoder/0")
    (True, False)
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(
            f"A pattern may have {MAX_PATTERN} characters; {shorten(pattern)} is longer."
        )
    try:
        tree = _parser.parse(pattern)
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{shorten(pattern)} is not a valid pattern: {error}") from None
    choices = _count_choices(tree)
    ends: _Ends | None = None
    reason = "flags"
    if not compiled.flags & ~re.UNICODE:
        try:
            ends = _sequence(tree)
        except _UnboundedError as error:
            reason = str(error)
    too_complex = (
        f"Pattern {shorten(pattern)} could take unbounded time, because of its {reason}. Write "
        "it with fewer or simpler repeats, or without that."
    )
    if choices is None and ends is None:
        raise ValueError(too_complex)

    def matches(path: str) -> bool:
        if len(path) > MAX_PATH:
            raise ValueError(f"A path may have {MAX_PATH} characters; {shorten(path)} is longer.")
        # Backtracking over c choices, none inside another, takes at most n**c steps.
        if choices is not None and max(len(path), 2) ** choices <= _MAX_STEPS:
            return compiled.fullmatch(path) is not None
        if ends is None:
            raise ValueError(too_complex)
        return len(path) in ends(_Run(path, {}), 0)

    return matches


class _UnboundedError(Exception):
    """The construct cannot be followed by sets of positions."""


def _count_choices(tree: Any, in_repeat: bool = False) -> int | None:
    """Counts the places where backtracking can choose; None if one lies inside a repeat."""
    total = 0
    for op, argument in tree:
        bodies: list[Any] = []
        repeats = False
        if op in _REPEATS:
            low, high, body = argument
            repeats = high > 1
            total += low != high
            bodies = [body]
        elif op is sre.SUBPATTERN:
            bodies = [argument[-1]]
        elif op is sre.BRANCH:
            total += 1
            bodies = argument[1]
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            bodies = [argument[1]]
        elif op is sre.ATOMIC_GROUP:
            bodies = [argument]
        elif op is sre.GROUPREF_EXISTS:
            return None
        for body in bodies:
            inner = _count_choices(body, in_repeat or repeats)
            if inner is None:
                return None
            total += inner
    return None if in_repeat and total else total


_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)


def _sequence(nodes: Any) -> _Ends:
    parts = [_node(op, argument) for op, argument in nodes]

    def ends(run: _Run, start: int) -> frozenset[int]:
        reached = frozenset((start,))
        for part in parts:
            reached = frozenset(end for position in reached for end in part(run, position))
            if not reached:
                break
        return reached

    return _once(ends)


def _once(ends: _Ends) -> _Ends:
    """Computes each position once in a run: this is what bounds the time."""

    def remembered(run: _Run, start: int) -> frozenset[int]:
        key = (id(ends), start)
        if key not in run.known:
            run.known[key] = ends(run, start)
        return run.known[key]

    return remembered


def _node(op: Any, argument: Any) -> _Ends:
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        return _character(_member(op, argument))
    if op is sre.SUBPATTERN:
        _, add_flags, del_flags, body = argument
        if add_flags or del_flags:
            raise _UnboundedError("inline flags")
        return _sequence(body)
    if op is sre.BRANCH:
        branches = [_sequence(branch) for branch in argument[1]]
        return lambda run, at: frozenset().union(*(branch(run, at) for branch in branches))
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, body = argument
        return _repeat(int(low), int(high), _sequence(body))
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        direction, body = argument
        if direction < 0:
            raise _UnboundedError("look-behind")
        ahead, wanted = _sequence(body), op is sre.ASSERT
        return lambda run, at: frozenset((at,) if bool(ahead(run, at)) is wanted else ())
    if op is sre.AT and argument in _ANCHORS:
        holds = _ANCHORS[argument]
        return lambda run, at: frozenset((at,) if holds(run.path, at) else ())
    raise _UnboundedError(str(op).lower())


def _character(member: Callable[[str], bool]) -> _Ends:
    def ends(run: _Run, start: int) -> frozenset[int]:
        matches = start < len(run.path) and member(run.path[start])
        return frozenset((start + 1,) if matches else ())

    return ends


def _repeat(low: int, high: int, body: _Ends) -> _Ends:
    def ends(run: _Run, start: int) -> frozenset[int]:
        # After n+1 rounds over a path of n characters some round consumed nothing, and rounds
        # that consume nothing can be dropped or repeated: no further round adds a position.
        enough = len(run.path) + 1
        reached = frozenset((start,))
        for _ in range(min(low, enough)):
            reached = frozenset(end for at in reached for end in body(run, at))
        result, frontier = set(reached), set(reached)
        for _ in range(min(high - low, enough)):
            frontier = {end for at in frontier for end in body(run, at)} - result
            if not frontier:
                break
            result |= frontier
        return frozenset(result)

    return _once(ends)


def _member(op: Any, argument: Any) -> Callable[[str], bool]:
    """Says which single characters a one-character node takes."""
    if op is sre.LITERAL:
        return lambda c: ord(c) == argument
    if op is sre.NOT_LITERAL:
        return lambda c: ord(c) != argument
    if op is sre.ANY:
        return lambda c: c != "\n"
    if op is sre.RANGE:
        return lambda c: bool(argument[0] <= ord(c) <= argument[1])
    if op is sre.CATEGORY:
        return _CATEGORIES[argument]
    negated = argument[0][0] is sre.NEGATE
    members = [_member(*item) for item in argument[negated:]]
    return lambda c: any(member(c) for member in members) is not negated


def _is_word(c: str) -> bool:
    return c.isalnum() or c == "_"


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: _is_word,
    sre.CATEGORY_NOT_WORD: lambda c: not _is_word(c),
}


def _at_boundary(path: str, at: int) -> bool:
    before = at > 0 and _is_word(path[at - 1])
    after = at < len(path) and _is_word(path[at])
    return before is not after


_ANCHORS: dict[Any, Callable[[str, int], bool]] = {
    sre.AT_BEGINNING: lambda path, at: at == 0,
    sre.AT_BEGINNING_STRING: lambda path, at: at == 0,
    sre.AT_END: lambda path, at: at == len(path) or path[at:] == "\n",
    sre.AT_END_STRING: lambda path, at: at == len(path),
    sre.AT_BOUNDARY: _at_boundary,
    sre.AT_NON_BOUNDARY: lambda path, at: bool(path) and not _at_boundary(path, at),
}
