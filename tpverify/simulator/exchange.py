"""Where ranks meet: collects each rank's call, matches it with its peers', computes once, delivers at wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tpverify.errors import CollectiveMismatch, SimulationError
from tpverify.ledger.matching import CrossingDetector, disagreement, located, name_crossing, name_difference
from tpverify.ledger.record import Record
from tpverify.simulator import collectives
from tpverify.simulator.plain_tensors import PlainTensors
from tpverify.simulator.recorder import call_sites
from tpverify.simulator.scheduler import Unwind, Wait


@dataclass
class Call:
    """One rank's call of a collective.

    Attributes:
        kind, reduce_op, root: as in :class:`~tpverify.ledger.record.Record`; ``root`` is a group rank.
        inputs: tensors read, in the order in which :mod:`collectives` takes them.
        outputs: tensors written at wait; the values that :mod:`collectives` returns are dealt out evenly, in order.
        parts: number of elements expected of each value, where the outputs' sizes do not say it.
        is_async: whether the caller goes on before the result is complete.
    """

    kind: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    reduce_op: str = ""
    root: int | None = None
    is_async: bool = False
    parts: tuple[int, ...] | None = None


@dataclass(eq=False)
class Meeting:
    """One collective of one group, until all its ranks have come; ``error`` is why torch cannot compute it."""

    members: tuple[int, ...]
    records: dict[int, Record] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    results: collectives.Results | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all ranks have come."""
        return self.results is not None or self.error is not None

    def result_of(self, group_rank: int) -> list[Tensor]:
        """What one rank is handed, of a meeting that is done.

        Raises:
            RuntimeError: torch cannot compute it: for every rank, as on a real backend.
        """
        if self.results is None:
            said = f"{type(self.error).__name__}: {self.error}"
            raise RuntimeError(f"Expected a collective that torch can compute but it raised {said}") from self.error
        return self.results[group_rank]

    def describe(self, rank: int) -> str:
        """What ``rank`` waits for, and whom."""
        record = self.records[self.members.index(rank)]
        missing = [str(member) for index, member in enumerate(self.members) if index not in self.records]
        plural = "s" if len(missing) > 1 else ""
        return f"waits in #{record.collective_seq_id} {located(record)} for rank{plural} {', '.join(missing)}"


@dataclass(eq=False)
class Message:
    """One send and the recv that takes it."""

    source: int
    destination: int
    tag: int
    sent: Tensor | None = None
    send_record: Record | None = None
    recv_record: Record | None = None

    @property
    def done(self) -> bool:
        """Whether both sides are there (sends complete when received, as NCCL's and large gloo sends do)."""
        return self.send_record is not None and self.recv_record is not None

    def describe(self, rank: int) -> str:
        """What ``rank`` waits for, and whom."""
        own = self.send_record if self.recv_record is None else self.recv_record
        peer = self.destination if self.recv_record is None else self.source
        return f"waits in {located(own) if own else 'recv'} for rank {peer if peer >= 0 else 'any'}"


@dataclass(eq=False)
class GroupState:
    """What one process group has under way."""

    members: tuple[int, ...]
    issued: dict[int, int] = field(default_factory=dict)
    meetings: dict[int, Meeting] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    crossings: dict[int, CrossingDetector] = field(default_factory=dict)


Perturb = Callable[[Meeting, collectives.Results], collectives.Results]
"""Given a complete meeting and what it computes, what its ranks get instead: how a fault of the program is imitated."""


class Turns(Protocol):
    """What decides which rank runs, or watches ranks that run by themselves."""

    def admit(self, rank: int) -> None:
        """Let a rank's call in."""

    def wake(self, wait: Wait) -> None:
        """Ranks that wait for this may go on."""

    def fail(self, error: SimulationError) -> None:
        """End the run."""


class Exchange:
    """All meetings of a world.

    Args:
        scheduler: blocks and wakes ranks, and ends the run.
        reduction_order: one of ``collectives.REDUCTION_ORDERS``.
        perturb: changes what a collective hands to its ranks; sees every collective, once all ranks have come.
    """

    def __init__(self, scheduler: Turns, reduction_order: str = "rank", perturb: Perturb | None = None) -> None:
        self._scheduler = scheduler
        self._order = reduction_order
        self._perturb = perturb
        self._groups: dict[str, GroupState] = {}
        self._created: dict[str, tuple[tuple[int, ...], int, str]] = {}

    def declare(self, group: str, members: tuple[int, ...], rank: int, site: str | None = None) -> None:
        """A rank creates a group, or learns that it is not a member of it; all ranks must mean the same group.

        Args:
            site: `` at file:line`` of the rank's call; None = the caller's.

        Raises:
            Unwind: they do not; the run has been failed with :class:`CollectiveMismatch`.
        """
        self._scheduler.admit(rank)
        if site is None:
            sites = call_sites()
            site = f" at {sites[0]}" if sites else ""
        first, creator, where = self._created.setdefault(group, (members, rank, site))
        if first != members:
            message = "Expected all ranks to create their process groups in the same order but they differ:"
            lines = sorted([(creator, f"new_group({list(first)}){where}"), (rank, f"new_group({list(members)}){site}")])
            message += "".join(f"\n  rank {number}  {line}" for number, line in lines)
            self._scheduler.fail(CollectiveMismatch(message, tuple(sorted((creator, rank)))))
            raise Unwind

    def next_number(self, group: str, members: tuple[int, ...], group_rank: int) -> int:
        """The number of the next collective that ``group_rank`` issues on the group, from 1."""
        state = self._groups.setdefault(group, GroupState(members))
        state.issued[group_rank] = state.issued.get(group_rank, 0) + 1
        return state.issued[group_rank]

    def join(self, group: str, group_rank: int, call: Call, record: Record) -> Meeting:
        """Bring one rank's call to its meeting; the last to come computes for all.

        Args:
            call: its inputs are copies where a rank may change them before all have taken their results.

        Raises:
            Unwind: the ranks disagree; the run has been failed with :class:`CollectiveMismatch`.
        """
        state = self._groups[group]
        number = record.collective_seq_id
        meeting = state.meetings.setdefault(number, Meeting(record.group_ranks))
        if meeting.records:
            first = next(iter(meeting.records.values()))
            what = disagreement(first, record)
            if what is not None:
                self._mismatch(name_difference(what, [first, record]), (first, record))
        meeting.records[group_rank] = record
        meeting.calls[group_rank] = call
        if len(meeting.records) == len(meeting.members):
            del state.meetings[number]
            self._check_crossing(state, meeting)
            self._compute(meeting, call)
            self._scheduler.wake(meeting)
        return meeting

    def post_send(self, group: str, members: tuple[int, ...], record: Record, ends: tuple[int, int], tag: int, tensor: Tensor) -> Message:
        """Offer a message; ``ends`` = (source, destination), global ranks."""
        messages = self._groups.setdefault(group, GroupState(members)).messages
        for message in messages:
            if message.send_record is None and message.destination == ends[1] and message.source in (ends[0], -1) and message.tag == tag:
                message.source, message.sent, message.send_record = ends[0], tensor, record
                messages.remove(message)
                self._check_message(message)
                self._scheduler.wake(message)
                return message
        message = Message(*ends, tag, sent=tensor, send_record=record)
        messages.append(message)
        return message

    def post_recv(self, group: str, members: tuple[int, ...], record: Record, ends: tuple[int, int], tag: int) -> Message:
        """Ask for a message; the source may be -1 (any)."""
        messages = self._groups.setdefault(group, GroupState(members)).messages
        for message in messages:
            if message.recv_record is None and message.destination == ends[1] and ends[0] in (message.source, -1) and message.tag == tag:
                message.recv_record = record
                messages.remove(message)
                self._check_message(message)
                self._scheduler.wake(message)
                return message
        message = Message(*ends, tag, recv_record=record)
        messages.append(message)
        return message

    @property
    def idle(self) -> bool:
        """Whether no collective waits for a rank and no message for its other end."""
        return not any(state.meetings or state.messages for state in self._groups.values())

    def unreceived(self) -> list[Record]:
        """Sends that no rank has received."""
        messages = [message for state in self._groups.values() for message in state.messages]
        return [message.send_record for message in messages if message.send_record is not None]

    def _mismatch(self, message: str, records: Sequence[Record]) -> None:
        self._scheduler.fail(CollectiveMismatch(message, tuple(sorted({record.rank for record in records}))))
        raise Unwind

    def _check_message(self, message: Message) -> None:
        sent, received = message.send_record, message.recv_record
        assert sent is not None and received is not None
        if (sent.input_dtypes, sent.elements) != (received.output_dtypes, received.elements):
            lines = [f"  rank {record.rank}  {located(record)}" for record in (sent, received)]
            self._mismatch("Expected send and recv to agree on dtype and size but they differ:\n" + "\n".join(lines), (sent, received))

    def _check_crossing(self, state: GroupState, meeting: Meeting) -> None:
        first = meeting.records[0]
        for group_rank, record in meeting.records.items():
            if group_rank == 0:
                continue
            crossed = state.crossings.setdefault(group_rank, CrossingDetector()).add(first, record)
            if crossed:
                self._mismatch(name_crossing(crossed), (first, record))

    def _compute(self, meeting: Meeting, call: Call) -> None:
        inputs = [meeting.calls[rank].inputs for rank in range(len(meeting.members))]
        try:
            with PlainTensors():
                results = collectives.compute(call.kind, inputs, call.reduce_op, self._order, call.root)
        except Exception as error:  # an operation that torch lacks for a dtype, say
            meeting.error = error
            return
        if self._perturb is not None:
            with PlainTensors():
                results = self._perturb(meeting, results)
        self._check_sizes(meeting, results)
        meeting.results = results

    def _check_sizes(self, meeting: Meeting, results: collectives.Results) -> None:
        """Every rank's buffers must hold what its peers send: what single calls cannot see."""
        for group_rank, values in enumerate(results):
            call, record = meeting.calls[group_rank], meeting.records[group_rank]
            got = [value.numel() for value in values]
            room = [output.numel() for output in call.outputs]
            each = len(got) // len(room) if room else 0
            dealt = [sum(got[index * each : (index + 1) * each]) for index in range(len(room))]
            if dealt != room or (call.parts is not None and list(call.parts) != got):
                expected = list(call.parts or room)
                lines = name_difference("size", list(meeting.records.values()))
                lines += f"\n  rank {record.rank} has room for {expected} elements and is sent {got}"
                self._mismatch(lines, list(meeting.records.values()))
