"""A rank's process groups over a real backend: every call is announced to the controller, then carried out by gloo or NCCL."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from tpverify.ledger.record import Record
from tpverify.processes.channel import Channel
from tpverify.processes.errors_as_data import described
from tpverify.simulator.endpoint import Capture, Endpoint, RecvWork, SimWork
from tpverify.simulator.exchange import Call
from tpverify.simulator.failures import rank_error
from tpverify.simulator.in_flight import IN_PLACE, Watch
from tpverify.simulator.plain_tensors import PlainTensors
from tpverify.simulator.process_group import RELEASE_NAMES, SimProcessGroup
from tpverify.simulator.recorder import Recorder, call_sites

POLL_SECONDS = 0.0005


class Pending:
    """What the real backend has under way for one call; ``work`` is its handle once the call has been handed over."""

    def __init__(self, op_id: int) -> None:
        self.work: Any = None
        self.op_id = op_id

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.work is not None and bool(self.work.is_completed())


class Announcer:
    """Tells the controller what this rank does; stands where a simulated rank has its scheduler and its exchange.

    A blocking collective starts when all its ranks have announced the same one: a backend that is given different ones hangs,
    crashes or returns nonsense. Asynchronous ones start at once.

    Args:
        channel: to the controller.
        admissions: one item for each blocking collective that may start.

    Attributes:
        broken: whether the backend has raised, so that its groups may be out of step between ranks.
    """

    def __init__(self, channel: Channel, admissions: queue.SimpleQueue[None]) -> None:
        self.broken = False
        self._admissions = admissions
        self._channel = channel

    def admit(self, rank: int) -> None:
        """Any thread may issue collectives."""

    def abandoned(self, rank: int) -> bool:
        """A process that is given up on is killed."""
        return False

    def pause(self, rank: int) -> None:
        """Give other processes a chance before polling again."""
        time.sleep(POLL_SECONDS)

    def wait_until(self, rank: int, pending: Pending) -> None:
        """Block until the backend is done."""
        if not pending.done:
            self._channel.send("wait", pending.op_id)
        self.backend(pending.work.wait)

    def declare(self, key: str, members: tuple[int, ...], rank: int) -> None:
        """A group is created, by its members and by all others."""
        sites = call_sites()
        self._channel.send("declare", key, members, f" at {sites[0]}" if sites else "")

    def connecting(self, key: str) -> None:
        """From here on this rank waits for the group's other members."""
        self._channel.send("connect", key)

    def issued(self, key: str, group_rank: int, record: Record, call: Call) -> None:
        """A collective, before the backend is asked; returns when it may be."""
        exception = sys.exc_info()[1]
        handled = None if exception is None else described(rank_error(record.rank, exception))
        inputs = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in call.inputs]
        outputs = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in call.outputs]
        self._channel.send("issue", key, group_rank, _bare(record), inputs, outputs, call.parts, handled)
        if not call.is_async:
            self._admissions.get()

    def messaged(self, key: str, record: Record, ends: tuple[int, int], tag: int) -> None:
        """A send or recv, before the backend is asked."""
        self._channel.send("message", key, _bare(record), ends, tag)

    def hazard(self, op_id: int, hazard: str) -> None:
        """A collective turned out to be used unsoundly."""
        self._channel.send("hazard", op_id, hazard)

    def backend(self, call: Callable[[], Any]) -> Any:
        """What the backend returns; notes if it raises."""
        try:
            return call()
        except BaseException:
            self.broken = True
            raise


def _bare(record: Record) -> Record:
    """The record without its payload, which travels with the rank's results."""
    return record if record.payload is None else replace(record, payload=None)


class RecordedEndpoint(Endpoint):
    """One rank's side of every collective: as on a simulated rank, but carried out by the backend of the group.

    Inputs of asynchronous calls are watched for writes; their outputs belong to the backend until the wait.
    """

    def __init__(self, rank: int, announcer: Announcer, recorder: Recorder, capture: Capture | None) -> None:
        stand_in = cast(Any, announcer)
        self.records: list[Record] = []
        super().__init__(rank, stand_in, stand_in, recorder, self.records, capture)
        self.announcer = announcer
        self._numbers: Counter[str] = Counter()

    def issue(self, group: SimProcessGroup, call: Call, whole_inputs: Sequence[Tensor]) -> SimWork:
        """Announce a collective and start it."""
        self._numbers[group.key] += 1
        index, record = self._record(group, call, whole_inputs, number=self._numbers[group.key])
        watch = _watch(call)
        self.announcer.issued(group.key, group.group_rank, record, call)
        work = SimWork(self, self._start(group, record), self._checked(watch, index), call.outputs)
        return self._work(work, index, call.is_async)

    def send(self, group: SimProcessGroup, tensor: Tensor, destination: int, tag: int) -> SimWork:
        """Announce a message and send it."""
        call = Call("send", [tensor], [], root=destination, is_async=True)
        index, record = self._record(group, call, [tensor], p2p=self._next_p2p(group, destination))
        watch = _watch(call)
        self.announcer.messaged(group.key, record, (self.rank, group.members[destination]), tag)
        return self._work(SimWork(self, self._start(group, record), self._checked(watch, index)), index, is_async=True)

    def recv(self, group: SimProcessGroup, tensor: Tensor, source: int | None, tag: int) -> SimWork:
        """Announce that a message is wanted and take it."""
        call = Call("recv", [], [tensor], root=source, is_async=True)
        index, record = self._record(group, call, [], p2p=self._next_p2p(group, -1 if source is None else source))
        peer = -1 if source is None else group.members[source]
        self.announcer.messaged(group.key, record, (peer, self.rank), tag)
        pending = self._start(group, record)

        def deliver() -> None:
            work.source = pending.work._source_rank() if source is None else source

        work = RecvWork(self, cast(Any, pending), deliver, [tensor])
        self._work(work, index, is_async=True)
        return work

    def payloads(self) -> list[tuple[int, tuple[Tensor, ...]]]:
        """What was captured, by position in this rank's ledger."""
        return [(record.op_id, record.payload) for record in self.records if record.payload is not None]

    def _start(self, group: SimProcessGroup, record: Record) -> Any:
        pending = Pending(record.op_id)
        self.announcer.backend(lambda: cast(RecordedProcessGroup, group).start(pending, message=record.kind in ("send", "recv")))
        return pending

    def _checked(self, watch: Watch | None, index: int) -> Callable[[], None]:
        def deliver() -> None:
            if watch is not None and watch.touched():
                self._add_hazard(index, "written in flight")

        return deliver

    def _add_hazard(self, index: int, hazard: str) -> None:
        super()._add_hazard(index, hazard)
        self.announcer.hazard(self.records[index].op_id, hazard)


def _watch(call: Call) -> Watch | None:
    if not call.is_async or call.kind in IN_PLACE:
        return None
    with PlainTensors():
        return Watch(Call(call.kind, call.inputs, []), [tensor.clone() for tensor in call.inputs])


class Together:
    """Messages that the backend must be given as one.

    Args:
        device: of their tensors.
        count: how many there will be; None = it is not known.
    """

    def __init__(self, device: torch.device, count: int | None) -> None:
        self.device = device
        self.count = count
        self.calls: list[tuple[Pending, Callable[[], Any]]] = []

    def start(self, inner: Any) -> None:
        """Hand all of them to the real group; they share one handle."""
        inner._start_coalescing(self.device)
        try:
            for _, call in self.calls:
                call()
        finally:
            work = inner._end_coalescing(self.device)
        for pending, _ in self.calls:
            pending.work = work


class RecordedProcessGroup(SimProcessGroup):
    """A simulated rank's process group, whose calls reach a real one with the arguments they came with.

    Args:
        inner: c10d's process group over the real backend.
    """

    def __init__(self, inner: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._inner = inner
        self._asked: Callable[[], Any] | None = None
        self._together: Together | None = None

    _device_types = property(lambda self: self._inner._device_types)

    def start(self, pending: Pending, *, message: bool) -> None:
        """Hand the present call to the real group, or keep it until all messages of its batch are there."""
        assert self._asked is not None
        if self._together is None or not message:
            pending.work = self._asked()
            return
        self._together.calls.append((pending, self._asked))
        if len(self._together.calls) == self._together.count:
            together, self._together = self._together, None
            together.start(self._inner)

    def expect_messages(self, device: torch.device, count: int | None = None) -> None:
        """The next ``count`` sends and receives are one batch, or all until :meth:`_end_coalescing`, where the backend has batches.

        NCCL carries messages out one after the other, so that two ranks which both receive first would wait for each other.
        """
        grouped = self._inner._get_backend(device).supports_coalescing
        self._together = Together(device, count) if grouped else None

    def _start_coalescing(self, device: Any = None) -> None:
        super()._start_coalescing(device)
        if device is not None:
            self.expect_messages(torch.device(device))

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        together, self._together = self._together, None
        if together is not None and together.calls:
            cast(RecordedEndpoint, self.endpoint).announcer.backend(lambda: together.start(self._inner))
        return super()._end_coalescing(device)

    def call(self, names: tuple[str, ...], name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One method of the interface; where one method is written in terms of another, the first is the call."""
        recorded = getattr(super(), name)
        if self._asked is not None:
            return recorded(*arguments, **options)
        known = name if hasattr(self._inner, name) else next(other for other in names if hasattr(self._inner, other))
        method = getattr(self._inner, known)
        plain, plain_options = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, (arguments, options))
        self._asked = lambda: method(*plain, **plain_options)
        try:
            return recorded(*arguments, **options)
        finally:
            self._asked = None


def _forwarding(names: tuple[str, ...], name: str) -> Any:
    def method(self: RecordedProcessGroup, *arguments: Any, **options: Any) -> Any:
        return self.call(names, name, arguments, options)

    method.__name__ = name
    return method


@contextlib.contextmanager
def batched_messages() -> Iterator[None]:
    """Within the block ``batch_isend_irecv`` tells a recorded group of the batch that is about to come.

    It would not ask a group of a class that it does not know; the function that checks its argument is where it can be met.
    """
    module: Any = c10d
    check = module._check_p2p_op_list

    def checked(operations: Any) -> None:
        check(operations)
        first = operations[0]
        group = c10d._get_default_group() if first.group is None else first.group
        if isinstance(group, RecordedProcessGroup):
            group.expect_messages(first.tensor.device, len(operations))

    module._check_p2p_op_list = checked
    try:
        yield
    finally:
        module._check_p2p_op_list = check


for _names in RELEASE_NAMES:
    for _name in _names:
        setattr(RecordedProcessGroup, _name, _forwarding(_names, _name))
