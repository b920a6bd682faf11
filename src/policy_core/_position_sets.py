"""Regular expressions matched by sets of positions: in bounded time, or refused.

Each part of a pattern becomes a function from the set of positions in the path where it may
start to the set of those where it may end. A set is an integer, whose bit `i` stands for the
position before `path[i]`, so that a step of all positions costs what one costs.
"""

import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]  # re's own parse tree
from typing import Any

# Under 10 ms on one core of 2 GHz, for the slowest patterns of the tests.
_MAX_STEPS = 15_000


class UnboundedError(Exception):
    """What cannot be followed by sets of positions, or not in the steps allowed."""


class _Run:
    """One match of one path: its sets of positions, and the steps that it took so far."""

    __slots__ = ("characters", "known", "path", "steps")

    def __init__(self, path: str) -> None:
        self.path = path
        self.steps = 0
        self.known: dict[int, int] = {}
        self.characters: dict[str, int] = {}
        for position, character in enumerate(path):
            self.characters[character] = self.characters.get(character, 0) | 1 << position

    def spend(self) -> None:
        """Counts one step; raises UnboundedError for one too many."""
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise UnboundedError("nested repeats")

    def positions(self, holds: Callable[[str, int], bool]) -> int:
        """Gives the set of positions at which `holds(path, position)`, computed once."""
        if id(holds) not in self.known:
            found = (1 << at for at in range(len(self.path) + 1) if holds(self.path, at))
            self.known[id(holds)] = sum(found)
        return self.known[id(holds)]

    def members(self, member: Callable[[str], bool]) -> int:
        """Gives the set of positions before a character that is a member, computed once."""
        if id(member) not in self.known:
            found = (mask for character, mask in self.characters.items() if member(character))
            self.known[id(member)] = sum(found)
        return self.known[id(member)]


Ends = Callable[[_Run, int], int]
"""From a set of positions to the set of those that the part can reach from any of them."""


def follow(ends: Ends, path: str) -> bool:
    """Says whether the whole path matches what `sequence` made of a pattern.

    Raises:
        UnboundedError: It takes too many steps.
    """
    return ends(_Run(path), 1) >> len(path) == 1


def sequence(nodes: Any) -> Ends:
    """Gives the function of a pattern, or of some nodes that follow each other in it.

    Args:
        nodes: What `re._parser.parse` gives, for a pattern without flags.

    Raises:
        UnboundedError: Something in it cannot be followed by sets of positions.
    """
    parts = [_node(op, argument) for op, argument in nodes]

    def ends(run: _Run, reached: int) -> int:
        for part in parts:
            if not reached:
                break
            run.spend()
            reached = part(run, reached)
        return reached

    return ends


def _node(op: Any, argument: Any) -> Ends:
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        member = _member(op, argument)
        return lambda run, starts: (starts & run.members(member)) << 1
    if op is sre.SUBPATTERN:
        _, add_flags, del_flags, body = argument
        if add_flags or del_flags:
            raise UnboundedError("inline flags")
        return sequence(body)
    if op is sre.BRANCH:
        return _branch([sequence(body) for body in argument[1]])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, body = argument
        return _repeat(int(low), int(high), sequence(body))
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        direction, body = argument
        if direction < 0:
            raise UnboundedError("look-behind")
        return _look_ahead(sequence(body), op is sre.ASSERT)
    if op is sre.AT and argument in _ANCHORS:
        holds = _ANCHORS[argument]
        return lambda run, starts: starts & run.positions(holds)
    if op is sre.FAILURE:
        return lambda run, starts: 0
    raise UnboundedError(str(op).lower())


def _branch(branches: list[Ends]) -> Ends:
    def ends(run: _Run, starts: int) -> int:
        reached = 0
        for branch in branches:
            run.spend()
            reached |= branch(run, starts)
        return reached

    return ends


def _repeat(low: int, high: int, body: Ends) -> Ends:
    def ends(run: _Run, starts: int) -> int:
        # After n+1 rounds over a path of n characters some round consumed nothing, and rounds
        # that consume nothing can be dropped or repeated: no further round changes anything.
        enough = len(run.path) + 1
        result = starts
        for _ in range(min(low, enough)):
            run.spend()
            before, result = result, body(run, result)
            if result == before:
                break
        frontier = result
        for _ in range(min(high - low, enough)):
            run.spend()
            frontier = body(run, frontier) & ~result
            if not frontier:
                break
            result |= frontier
        return result

    return ends


def _look_ahead(ahead: Ends, wanted: bool) -> Ends:
    def ends(run: _Run, starts: int) -> int:
        result = 0
        while starts:
            run.spend()
            start = starts & -starts
            starts ^= start
            if bool(ahead(run, start)) is wanted:
                result |= start
        return result

    return ends


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

# Python 3.14 changed this answer.
_EMPTY_IS_NO_BOUNDARY = re.fullmatch(r"\B", "") is not None


def _at_boundary(path: str, at: int) -> bool:
    before = at > 0 and _is_word(path[at - 1])
    after = at < len(path) and _is_word(path[at])
    return before is not after


def _at_no_boundary(path: str, at: int) -> bool:
    return not _at_boundary(path, at) if path else _EMPTY_IS_NO_BOUNDARY


_ANCHORS: dict[Any, Callable[[str, int], bool]] = {
    sre.AT_BEGINNING: lambda path, at: at == 0,
    sre.AT_BEGINNING_STRING: lambda path, at: at == 0,
    sre.AT_END: lambda path, at: at == len(path) or path[at:] == "\n",
    sre.AT_END_STRING: lambda path, at: at == len(path),
    sre.AT_BOUNDARY: _at_boundary,
    sre.AT_NON_BOUNDARY: _at_no_boundary,
}
