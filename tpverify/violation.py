"""A violation: one broken check on one case, as plain data that every report format reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One broken check.

    Attributes:
        check: id of the check, e.g. ``"forward"`` (see ``tpverify list``).
        subject: name of the subject.
        world_size: number of ranks of the TP group.
        ranks: ranks (within the TP group) on which the violation shows.
        tensor: the tensor concerned, e.g. ``"weight.grad"``; empty where there is none.
        message: what was expected and what was found; may span lines.
        diagnosis: one line, only where an exact pattern fits; empty otherwise.
        case: evaluable repr of the case.
        replay: the shell command that runs the case again.
    """

    check: str
    subject: str
    world_size: int
    ranks: tuple[int, ...]
    tensor: str
    message: str
    diagnosis: str = ""
    case: str = ""
    replay: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The violation as JSON-ready data (tuples as lists)."""
        data = asdict(self)
        data["ranks"] = list(self.ranks)
        return data


def failure_report(violation: Violation) -> str:
    """One violation as text: subject, world size and ranks first, then what differs, the failing test case and how to replay it."""
    ranks = f", {_ranks(violation.ranks)}" if violation.ranks else ""
    lines = [f"tpverify: {violation.check} check failed: {violation.subject}, world_size={violation.world_size}{ranks}", ""]
    lines += [violation.message]
    if violation.diagnosis:
        lines += [f"  {violation.diagnosis}"]
    if violation.case:
        lines += [f"Failing test case: {violation.case}"]
    if violation.replay:
        lines += [f"Replay: {violation.replay}"]
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
