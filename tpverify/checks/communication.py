"""Checks ``communication`` and ``buffers``: exactly the collectives that are needed, agreed between ranks, on sound buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase

from tpverify.checks.finding import Finding
from tpverify.checks.summands import foreign_group
from tpverify.errors import CollectiveMismatch, Deadlock
from tpverify.ledger.ledger import HAZARDS, Ledger
from tpverify.ledger.matching import located
from tpverify.ledger.record import Record
from tpverify.run import Comparison
from tpverify.subjects.subject import Collective

COMPARED_PHASES = ("forward", "backward", "recompute", "optimizer")
"""What happens while the module is built is nobody's concern."""


def communication(comparison: Comparison) -> list[Finding] | None:
    """Ranks agree on every collective; and there are exactly those that the subject declares, in the right place and size."""
    run = comparison.parallel
    if isinstance(run.error, (CollectiveMismatch, Deadlock)):
        return [Finding(_within(run.error.ranks, comparison.members), "", str(run.error))]
    if run.error is not None or not comparison.reference.ranks:
        return None
    findings = _disagreements(comparison)
    communication = comparison.subject.communication
    declared = None if communication is None else communication(comparison.case.config, comparison.case.world_size)
    if declared is None:
        return findings if len(run.ledger) or findings else None
    findings += _differences(comparison, [_in_all_calls(comparison, collective) for collective in declared if collective.count])
    strayed = [line for phase in COMPARED_PHASES if (line := foreign_group(comparison, phase))]
    return [replace(finding, diagnosis=strayed[0]) for finding in findings] if strayed else findings


def _in_all_calls(comparison: Comparison, collective: Collective) -> Collective:
    """What is declared of one forward and backward happens in every call; ``finalize_gradients`` comes once, at the end."""
    calls = 1 if collective.phase == "optimizer" else comparison.case.call_count
    return replace(collective, count=calls * collective.count)


def _within(ranks: tuple[int, ...], members: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(members.index(rank) for rank in ranks if rank in members) or tuple(range(len(members)))


def _disagreements(comparison: Comparison) -> list[Finding]:
    """Ranks of one group must have issued equally many collectives of each kind in each place."""
    members = comparison.members
    counted: dict[int, Counter[tuple[str, str, str]]] = {
        rank: Counter(
            (record.kind, record.phase, record.module)
            for record in comparison.parallel.ledger.rank(rank)
            if record.group_ranks == members and record.phase in COMPARED_PHASES and record.collective_seq_id
        )
        for rank in members
    }
    findings = []
    for index, rank in enumerate(members[1:], start=1):
        for kind, phase, module in sorted(set(counted[members[0]]) | set(counted[rank])):
            here, there = counted[rank][kind, phase, module], counted[members[0]][kind, phase, module]
            if here != there:
                where = f" of {module}" if module else ""
                message = f"Expected all ranks to issue as many {kind} in {phase}{where} but rank {index} issued {here} and rank 0 {there}"
                findings.append(Finding((index,), "", message))
    return findings


def _differences(comparison: Comparison, expected: list[Collective]) -> list[Finding]:
    """What the declared collectives and each rank's ledger have beyond each other; ranks with the same difference share a finding."""
    by_message: dict[tuple[str, str], list[int]] = {}
    for index, rank in enumerate(comparison.members):
        for message in _rank_differences(expected, comparison.parallel.ledger.rank(rank)):
            by_message.setdefault(message, []).append(index)
    return [Finding(tuple(ranks), "", *message) for message, ranks in by_message.items()]


def _rank_differences(expected: list[Collective], ledger: Ledger) -> list[tuple[str, str]]:
    """Messages, each with its diagnosis."""
    remaining = [collective.count for collective in expected]
    last: dict[str, Record] = {}
    extra: list[tuple[Record, bool]] = []
    for record in ledger:
        if record.phase not in COMPARED_PHASES or (len(record.group_ranks) == 1 and not any(_fits(c, record) for c in expected)):
            continue
        matching = [i for i, collective in enumerate(expected) if _fits(collective, record)]
        free = [i for i in matching if remaining[i]]
        if free:
            remaining[free[0]] -= 1
        else:
            extra.append((record, bool(matching)))
        last[record.phase] = record
    missing = [(collective, count) for collective, count in zip(expected, remaining, strict=True) if count]
    diagnosis = _mistaken([collective for collective, _ in missing], [record for record, _ in extra])
    messages = [_missing(collective, count, last.get(collective.phase)) for collective, count in missing]
    for record, repeated in extra:
        ordinal = "once more than declared" if repeated else "which nothing declares"
        messages.append(f"Expected no further collective in {record.phase} but got {located(record)}, {ordinal}")
    return [(message, diagnosis) for message in dict.fromkeys(messages)]


def _mistaken(missing: list[Collective], extra: list[Record]) -> str:
    """What is issued in place of something that is declared and does not come."""
    for collective in missing:
        for record in extra:
            if collective.reduce_op and _fits(replace(collective, reduce_op=""), record):
                return f"{record.reduce_op} stands where {collective.reduce_op} is declared: a wrong reduce op fits this"
            if record.reduce_op in ("", collective.reduce_op) or not collective.reduce_op:
                if _fits(replace(collective, elements=None), record):
                    return (
                        f"{record.elements} elements travel where {collective.elements} are declared: split or gathered messages fit this"
                    )
                if _fits(replace(collective, kind=record.kind, elements=None), record):
                    return f"{record.kind} stands where {collective.kind} is declared: a wrong kind of collective fits this"
                if _fits(replace(collective, module=record.module), record):
                    where = f"{record.module or 'the root module'} where {collective.module or 'the root module'}"
                    return f"it is issued in {where} is declared: a reduction in the wrong place fits this"
    return ""


def _fits(collective: Collective, record: Record) -> bool:
    return (
        collective.kind == record.kind
        and collective.phase == record.phase
        and fnmatchcase(record.module, collective.module)
        and collective.elements in (None, record.elements)
        and collective.reduce_op in ("", record.reduce_op)
    )


def _missing(collective: Collective, missing: int, last: Record | None) -> str:
    size = f" of {collective.elements} elements" if collective.elements is not None else ""
    module = f" of {collective.module}" if collective.module not in ("", "*") else ""
    after = f"nothing after {located(last)}" if last else f"no collective in {collective.phase} at all"
    plural = "s" if collective.count > 1 else ""
    operator = f" ({collective.reduce_op})" if collective.reduce_op else ""
    wanted = f"{collective.count} {collective.kind}{plural}{operator}{size} in {collective.phase}{module}"
    return f"Expected {wanted} but got {collective.count - missing}: {after}"


def _why(comparison: Comparison, hazard: str) -> str:
    layout = comparison.case.layout
    if hazard != "non-contiguous" or layout == "contiguous":
        return ""
    return f"\n  (inputs and gradients of outputs are {layout} here, as callers may have them; clone() keeps strides, contiguous() not)"


def buffers(comparison: Comparison) -> list[Finding] | None:
    """Inputs and outputs are left as they were, and no collective is used in a way that a real backend does not survive."""
    run = comparison.parallel
    if run.error is not None or not comparison.reference.ranks:
        return None
    by_message: dict[str, set[int]] = {}
    for record in run.ledger.hazards():
        for hazard in record.hazards:
            if len(record.group_ranks) > 1:
                text = f"Expected sound use of buffers but got {HAZARDS[hazard]}\n  {located(record)}{_why(comparison, hazard)}"
                by_message.setdefault(text, set()).add(comparison.members.index(record.rank))
    for rank, part in enumerate(run.ranks):
        for name in part.changed_inputs:
            if name not in comparison.reference.ranks[0].changed_inputs:
                text = f"Expected the module to leave its input {name} as it was but it wrote to it, which the reference does not"
                by_message.setdefault(text, set()).add(rank)
        for name in part.changed_outputs:
            if name not in comparison.reference.ranks[0].changed_outputs:
                text = f"Expected {name} to keep the value that forward returned but it changed before its backward was done"
                by_message.setdefault(text, set()).add(rank)
    return [Finding(tuple(sorted(ranks)), "", text) for text, ranks in by_message.items()]
