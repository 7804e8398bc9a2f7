"""Follows the ranks of one case live: matches what they announce as the simulator does, and knows who waits for whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tpverify.errors import CaseError, CollectiveMismatch, Deadlock, RankError, SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.matching import disagreement, located, name_difference
from tpverify.ledger.record import Record
from tpverify.processes.codec import DTYPES
from tpverify.processes.errors_as_data import rebuilt
from tpverify.run import RankRun
from tpverify.simulator.exchange import Call, Exchange
from tpverify.simulator.failures import deadlock
from tpverify.simulator.scheduler import Unwind, Wait


@dataclass(eq=False)
class Creation:
    """One process group, until all its members have created it."""

    members: tuple[int, ...]
    sites: dict[int, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether all members have come."""
        return all(member in self.sites for member in self.members)

    def describe(self, rank: int) -> str:
        """What ``rank`` waits for, and whom."""
        missing = [str(member) for member in self.members if member not in self.sites]
        return f"waits in new_group({list(self.members)}){self.sites.get(rank, '')} for rank{'s' * (len(missing) > 1)} {', '.join(missing)}"


class Monitor:
    """What the controller knows about a case that runs.

    Tensors are known by shape and dtype only; the exchange of the simulator computes shapes from that.

    Args:
        world_size: number of ranks.
        admit: called with each rank whose blocking collective may start.

    Attributes:
        failure: the first thing that ranks disagree on, or None.
        returned: by rank, what its program produced.
        raised: by rank, what ended its program.
        broken: whether a backend has raised.
        unusable: why a rank cannot run this case at all, or "".
        places: by rank, where a rank that was asked says that it is.
    """

    def __init__(self, world_size: int, admit: Callable[[int], None]) -> None:
        self.world_size = world_size
        self._admit = admit
        self._blocking: set[int] = set()
        self.failure: SimulationError | None = None
        self.returned: dict[int, RankRun] = {}
        self.raised: dict[int, RankError] = {}
        self.broken = False
        self.unusable = ""
        self.places: dict[int, Sequence[str]] = {}
        self._exchange = Exchange(self)
        self._records: dict[tuple[int, int], Record] = {}
        self._under_way: dict[tuple[int, int], Wait] = {}
        self._waits: dict[int, Wait] = {}
        self._creations: dict[str, Creation] = {}
        self._handled: dict[int, RankError] = {}
        self._announced: dict[tuple[str, int], dict[int, Record]] = {}
        self._dispute = ("", 0)

    def admit(self, rank: int) -> None:
        """Real ranks run by themselves."""

    def wake(self, wait: Wait) -> None:
        """A collective is complete: those of its ranks that wait to start it may."""
        for rank in [rank for rank in self._blocking if self._waits[rank] is wait]:
            self._blocking.remove(rank)
            self._admit(rank)

    def fail(self, error: SimulationError) -> None:
        """The ranks disagree."""
        if self.failure is None:
            self.failure = self._root_cause(error)

    def take(self, rank: int, message: tuple[Any, ...]) -> None:
        """What a rank announces, in its order; after a disagreement only what the others say at the same place is of interest."""
        kind, *arguments = message
        if self.failure is None or kind == "issue":
            with contextlib.suppress(Unwind):
                getattr(self, f"_on_{kind}")(rank, *arguments)

    @property
    def disputed(self) -> bool:
        """Whether ranks disagree, and no other rank is about to say what it means."""
        heard = self._announced.get(self._dispute, {})
        return self.failure is not None and all(rank in heard or self.blocked(rank) for rank in self.unfinished)

    def disagreement(self) -> SimulationError | None:
        """What ranks disagree on, if anything: whoever came first, the lowest rank and the lowest that differs from it."""
        announced = self._announced.get(self._dispute, {}) if self.failure is not None else {}
        records = [announced[rank] for rank in sorted(announced)]
        for first, other in ((records[0], other) for other in records[1:]):
            if what := disagreement(first, other):
                return self._root_cause(CollectiveMismatch(name_difference(what, [first, other]), (first.rank, other.rank)))
        return self.failure

    @property
    def unfinished(self) -> list[int]:
        """Ranks whose program has neither returned nor raised."""
        return [rank for rank in range(self.world_size) if rank not in self.returned and rank not in self.raised]

    def waiting(self) -> dict[int, str]:
        """What each rank waits for that cannot go on without another."""
        return {rank: self._waits[rank].describe(rank) for rank in self.unfinished if self.blocked(rank)}

    def blocked(self, rank: int) -> bool:
        """Whether the rank waits for something that has not happened yet."""
        return rank in self._waits and not self._waits[rank].done

    @property
    def idle(self) -> bool:
        """Whether nothing is left in the backends: every collective and message met its other ends."""
        return not self.broken and self._exchange.idle and all(creation.done for creation in self._creations.values())

    def deadlock(self) -> SimulationError:
        """The error when every unfinished rank is blocked."""
        return self._root_cause(deadlock(self.waiting(), self.world_size))

    def last_call(self, rank: int) -> str:
        """The last collective that a rank issued, or ""."""
        issued = [record for (issuer, _), record in self._records.items() if issuer == rank]
        return located(issued[-1]) if issued else ""

    def ledger(self) -> Ledger:
        """Every collective announced, by position in its rank's program."""
        finished = self.failure is None and not self.unfinished and not self.raised
        unreceived = {(record.rank, record.op_id) for record in self._exchange.unreceived()} if finished else set()
        records = [self._records[key] for key in sorted(self._records, key=lambda key: (key[1], key[0]))]
        return Ledger(replace(r, hazards=(*r.hazards, "never received")) if (r.rank, r.op_id) in unreceived else r for r in records)

    def _root_cause(self, error: SimulationError) -> SimulationError:
        """A rank that handles an exception has left its path: then that is what went wrong."""
        for rank in error.ranks if isinstance(error, (CollectiveMismatch, Deadlock)) else ():
            if rank in self._handled:
                cause = self._handled[rank]
                return RankError(f"{cause}\n\nWhile rank {rank} handled this exception:\n{error}", rank, cause.exception)
        return error

    def _on_declare(self, rank: int, key: str, members: tuple[int, ...], site: str) -> None:
        self._creations.setdefault(key, Creation(members)).sites[rank] = site
        self._exchange.declare(key, members, rank, site)

    def _on_connect(self, rank: int, key: str) -> None:
        if key in self._creations:
            self._waits[rank] = self._creations[key]

    def _on_issue(
        self,
        rank: int,
        key: str,
        group_rank: int,
        record: Record,
        inputs: Sequence[tuple[Sequence[int], str]],
        outputs: Sequence[tuple[Sequence[int], str]],
        parts: tuple[int, ...] | None,
        handled: tuple[str, Sequence[str], str] | None,
    ) -> None:
        place = (key, record.collective_seq_id)
        if self.failure is not None and place != self._dispute:
            return
        self._announced.setdefault(place, {})[rank] = record
        self._handled.pop(rank, None)
        if handled is not None:
            self._handled[rank] = rebuilt(rank, *handled)
        self._records[rank, record.op_id] = record
        if self.failure is not None:
            return
        self._dispute = place
        self._exchange.next_number(key, record.group_ranks, group_rank)
        shapes = Call(record.kind, _shapes(inputs), _shapes(outputs), record.reduce_op, record.root, record.is_async, parts)
        meeting = self._exchange.join(key, group_rank, shapes, record)
        if meeting.done:
            del self._announced[place]
        self._began(rank, record, meeting)

    def _on_message(self, rank: int, key: str, record: Record, ends: tuple[int, int], tag: int) -> None:
        self._records[rank, record.op_id] = record
        if record.kind == "send":
            message = self._exchange.post_send(key, record.group_ranks, record, ends, tag, torch.empty(0, device="meta"))
        else:
            message = self._exchange.post_recv(key, record.group_ranks, record, ends, tag)
        self._began(rank, record, message)

    def _began(self, rank: int, record: Record, wait: Wait) -> None:
        self._under_way[rank, record.op_id] = wait
        if not record.is_async:
            self._waits[rank] = wait
            self._blocking.add(rank)
            if wait.done:
                self.wake(wait)

    def _on_wait(self, rank: int, op_id: int) -> None:
        self._waits[rank] = self._under_way[rank, op_id]

    def _on_hazard(self, rank: int, op_id: int, hazard: str) -> None:
        record = self._records[rank, op_id]
        self._records[rank, op_id] = replace(record, hazards=(*record.hazards, hazard))

    def _on_returned(self, rank: int, run: RankRun, payloads: Sequence[tuple[int, Any]]) -> None:
        self.returned[rank] = run
        for op_id, payload in payloads:
            self._records[rank, op_id] = replace(self._records[rank, op_id], payload=payload)

    def _on_unusable(self, rank: int, reason: str) -> None:
        self.unusable = self.unusable or f"rank {rank}: {reason}"
        self.raised[rank] = RankError(reason, rank, CaseError(reason))

    def _on_raised(self, rank: int, report: str, names: Sequence[str], message: str, broken: bool) -> None:
        self.raised[rank] = rebuilt(rank, report, names, message)
        self.broken = self.broken or broken

    def _on_where(self, rank: int, sites: Sequence[str]) -> None:
        self.places[rank] = sites


def _shapes(described: Sequence[tuple[Sequence[int], str]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=DTYPES[dtype], device="meta") for shape, dtype in described]
