"""Whether two lines are alternatives of one branch, so that a rank runs the one where its peer runs the other."""

from __future__ import annotations

import ast
import functools
import linecache
from collections import Counter
from collections.abc import Iterator, Sequence

from tpverify.ledger.record import CallSite

Arm = tuple[int, int]
"""First and last line of one arm of a branch."""


def parting(first: Sequence[CallSite], other: Sequence[CallSite]) -> tuple[CallSite, CallSite] | None:
    """The outermost lines in which two stacks (innermost first) differ; None if one runs out before they do."""
    return next(((a, b) for a, b in zip(reversed(first), reversed(other), strict=False) if a != b), None)


def take_turns(stacks: Sequence[tuple[Sequence[CallSite], Sequence[CallSite]]]) -> bool:
    """Whether over a stretch of calls two ranks merely took turns in the arms of one branch.

    That is so if their stacks part in different arms of a branch each time, and if both have been in the same arms equally
    often. (A rank whose arm does two things in another order than its peer's arm has not.) Where the source cannot be
    read, lines of one function count as arms: nothing is claimed that cannot be shown.
    """
    parted = [parting(first, other) for first, other in stacks]
    lines = [pair for pair in parted if pair is not None]
    if len(lines) < len(parted) or not all(a.filename == b.filename and a.function == b.function and _exclusive(a, b) for a, b in lines):
        return False
    return Counter(a for a, _ in lines) == Counter(b for _, b in lines)


def _exclusive(a: CallSite, b: CallSite) -> bool:
    branches = _branches(a.filename)
    if branches is None:
        return True
    return any(_arm(arms, a.line) is not None and _arm(arms, b.line) not in (None, _arm(arms, a.line)) for arms in branches)


def _arm(arms: Sequence[Arm], line: int) -> int | None:
    return next((index for index, (start, end) in enumerate(arms) if start <= line <= end), None)


@functools.lru_cache(maxsize=64)
def _branches(filename: str) -> tuple[tuple[Arm, ...], ...] | None:
    """The arms of every branch in a file; None if it cannot be read."""
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    return tuple(tuple(_arms(node)) for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp, ast.Match))) if source else None


def _arms(node: ast.If | ast.IfExp | ast.Match) -> Iterator[Arm]:
    parts: list[Sequence[ast.stmt] | Sequence[ast.expr]]
    if isinstance(node, ast.Match):
        parts = [case.body for case in node.cases]
    elif isinstance(node, ast.If):
        parts = [node.body, node.orelse]
    else:
        parts = [[node.body], [node.orelse]]
    for part in parts:
        if part:
            yield part[0].lineno, part[-1].end_lineno or part[-1].lineno
