"""Do two worlds agree about a case of a subject? Outputs, gradients and ledger of every rank, against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tpverify.case import Case
from tpverify.conformance.comparison import same, unequal_errors, unequal_ledgers
from tpverify.run import Comparison, Placed, RankRun
from tpverify.runner import run_both
from tpverify.subjects.subject import Subject
from tpverify.tolerance import tolerance
from tpverify.world import World

PARTS = ("outputs", "input_gradients", "parameters", "parameter_gradients")


def unequal_runs(subject: Subject, case: Case, world: World, timeout: float = 60.0) -> list[str]:
    """Where the simulator's run of a case and another world's differ, one line each.

    Sums of two numbers do not depend on their order, and sums of small integers on none: those runs are equal bit for bit. Others
    agree within what the order of summation may change.
    """
    found = []
    pairs = zip(run_both(subject, case, timeout), run_both(subject, case, timeout, world=world), strict=True)
    for ours, theirs in pairs:
        if ours.parallel.error is not None or theirs.parallel.error is not None:
            found += unequal_errors(ours.parallel.error, theirs.parallel.error)
            continue
        found += unequal_ledgers(ours.parallel.ledger, theirs.parallel.ledger, max(ours.members) + 1)
        exact = case.world_size <= 2 or (case.values == "integers" and subject.exact_for(case.config))
        found += _unequal_tensors(ours, theirs, 0.0 if exact else _slack(ours, subject.precision))
    return found


def _slack(ours: Comparison, precision: torch.dtype) -> float:
    """What a sum in another order may change, relative to the largest number of its kind."""
    return tolerance(precision, ours.reference.depth, ours.reference.terms)


def _unequal_tensors(ours: Comparison, theirs: Comparison, slack: float) -> Iterator[str]:
    for rank, (mine, other) in enumerate(zip(ours.parallel.ranks, theirs.parallel.ranks, strict=True)):
        if (mine.ties, mine.changed_inputs) != (other.ties, other.changed_inputs):
            yield f"rank {rank} has ties {mine.ties} and {other.ties}, changed inputs {mine.changed_inputs} and {other.changed_inputs}"
        for part in PARTS:
            yield from (f"rank {ours.members[rank]} {line}" for line in _unequal_part(part, mine, other, slack))


def _unequal_part(part: str, mine: RankRun, other: RankRun, slack: float) -> Iterator[str]:
    ours: Mapping[str, Placed] = getattr(mine, part)
    theirs: Mapping[str, Placed] = getattr(other, part)
    if list(ours) != list(theirs):
        yield f"{part} are {list(ours)} and {list(theirs)}"
        return
    largest = max([0.0, *(_largest(placed) for placed in ours.values())])
    for name, placed in ours.items():
        one, two = placed.local, theirs[name].local
        if placed.layout != theirs[name].layout or (one is None) != (two is None):
            yield f"{part} {name} is {placed} and {theirs[name]}"
        elif one is not None and two is not None:
            allowed = torch.full(one.shape, slack * largest, dtype=torch.float64) if slack else None
            if not same(one, two, allowed):
                yield f"{part} {name} is {one} and {two}"


def _largest(placed: Placed) -> float:
    if placed.local is None or not placed.local.numel():
        return 0.0
    return float(placed.local.detach().abs().to(torch.float64).max())
