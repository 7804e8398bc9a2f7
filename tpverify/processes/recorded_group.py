"""A rank's process groups over a real backend: every call is announced to the controller, then carried out by gloo or NCCL."""

from __future__ import annotations

import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from tpverify.ledger.record import Record
from tpverify.processes.channel import Channel
from tpverify.processes.errors_as_data import described
from tpverify.simulator.endpoint import Capture, Endpoint, RecvWork, SimWork
from tpverify.simulator.exchange import Call
from tpverify.simulator.failures import rank_error
from tpverify.simulator.in_flight import IN_PLACE, PlainTensors, Watch
from tpverify.simulator.process_group import RELEASE_NAMES, SimProcessGroup
from tpverify.simulator.recorder import Recorder, call_sites

POLL_SECONDS = 0.0005
# The controller ends a case that takes too long; the backend's own timeout must not come first.
BACKEND_TIMEOUT = timedelta(days=1)

_bindings: Any = torch._C._distributed_c10d


class Pending:
    """What the real backend has under way for one call."""

    def __init__(self, work: Any, op_id: int) -> None:
        self.work = work
        self.op_id = op_id

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return bool(self.work.is_completed())


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
        return Pending(self.announcer.backend(cast(RecordedProcessGroup, group).request), record.op_id)

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
    with torch.no_grad(), PlainTensors():
        return Watch(Call(call.kind, call.inputs, []), [tensor.clone() for tensor in call.inputs])


class RecordedProcessGroup(SimProcessGroup):
    """A simulated rank's process group, whose calls reach a real one with the arguments they came with.

    Args:
        inner: c10d's process group over the real backend.
    """

    def __init__(self, inner: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._inner = inner
        self._asked: Callable[[], Any] | None = None

    def request(self) -> Any:
        """Hand the present call to the real group; its Work."""
        assert self._asked is not None
        return self._asked()

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


for _names in RELEASE_NAMES:
    for _name in _names:
        setattr(RecordedProcessGroup, _name, _forwarding(_names, _name))


class Backends:
    """The real process groups of this process. They outlive a case: connecting costs more than a small case.

    Every case numbers the groups that it creates over the same members; so all ranks take the same one.

    Args:
        backend: ``gloo`` or ``nccl``.
        device: where this rank's tensors are.
        store: through which the processes find each other.
        rank: of this process.
    """

    def __init__(self, backend: str, device: torch.device, store: Any, rank: int) -> None:
        self.name = backend
        self._device = device
        self._store = store
        self._rank = rank
        self._groups: dict[tuple[tuple[int, ...], int], Any] = {}
        self._taken: Counter[tuple[int, ...]] = Counter()

    def start_case(self) -> None:
        """All groups are free again."""
        self._taken.clear()

    def take(self, members: tuple[int, ...], before_connecting: Callable[[], None]) -> Any:
        """A group over these global ranks that the running case does not use yet."""
        key = (members, self._taken[members])
        self._taken[members] += 1
        if key not in self._groups:
            before_connecting()
            self._groups[key] = self._connect(*key)
        return self._groups[key]

    def _connect(self, members: tuple[int, ...], number: int) -> Any:
        store = _bindings.PrefixStore(f"{'-'.join(map(str, members))}/{number}", self._store)
        group_rank, size = members.index(self._rank), len(members)
        group: Any = dist.ProcessGroup(store, group_rank, size)
        if self.name == "gloo":
            kind = dist.ProcessGroup.BackendType.GLOO
            backend = _bindings.ProcessGroupGloo(store, group_rank, size, timeout=BACKEND_TIMEOUT)
        else:
            kind = dist.ProcessGroup.BackendType.NCCL
            options = _bindings.ProcessGroupNCCL.Options()
            options._timeout = BACKEND_TIMEOUT
            backend = _bindings.ProcessGroupNCCL(store, group_rank, size, options)
        group._set_default_backend(kind)
        group._register_backend(self._device, kind, backend)
        return group
