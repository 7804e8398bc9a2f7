"""One rank's side of every collective: records it, takes copies, poisons buffers, waits, writes results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.ledger.record import Record
from tpverify.simulator.collectives import REDUCING
from tpverify.simulator.exchange import Call, Exchange, Meeting, Message
from tpverify.simulator.in_flight import Watch, poison_outputs
from tpverify.simulator.plain_tensors import PlainTensors
from tpverify.simulator.recorder import Recorder, call_sites
from tpverify.simulator.scheduler import Scheduler

if TYPE_CHECKING:
    from tpverify.simulator.process_group import SimProcessGroup

Capture = Callable[[Record], bool]


class SimWork(dist.Work):
    """Handle of one collective; results are written when it is waited for.

    ``held`` handles belong to a coalesced batch: only the batch's own handle waits for them.
    """

    def __init__(
        self, endpoint: Endpoint, pending: Meeting | Message | None, deliver: Callable[[], None], outputs: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.held = False
        self._endpoint = endpoint
        self._pending = pending
        self._deliver: Callable[[], None] | None = deliver
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until complete, then write the results."""
        if self._deliver is not None and not self.held:
            if self._pending is not None:
                self._endpoint.scheduler.wait_until(self._endpoint.rank, self._pending)
            deliver, self._deliver, self._pending = self._deliver, None, None
            self._endpoint.settled(self)
            deliver()
        return True

    def drop(self) -> list[Tensor]:
        """Never deliver; the outputs."""
        self._deliver = self._pending = None
        return self._outputs

    def synchronize(self) -> None:
        """The same as :meth:`wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the results are there; lets the other ranks run, so that polling ends."""
        if self._pending is not None and not self._pending.done:
            self._endpoint.scheduler.pause(self._endpoint.rank)
        if self._pending is None or self._pending.done:
            self.wait()
            return True
        return False

    def is_success(self) -> bool:
        """A simulated collective succeeds or ends the run."""
        return self._deliver is None

    def exception(self) -> None:
        """A simulated collective succeeds or ends the run."""

    def result(self) -> list[Tensor]:
        """The output tensors, once complete."""
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future of the output tensors: asking waits, because a callback would run on no rank's turn."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


class RecvWork(SimWork):
    """Handle of a recv; knows the sender afterwards."""

    source = -1

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """The group rank the message came from."""
        return self.source


class Endpoint:
    """What one rank's process groups share.

    Args:
        rank: global rank.
        scheduler, exchange, recorder: of this world and rank.
        records: the world's ledger, appended to.
        capture: records whose input tensors are kept as ``payload``.
    """

    def __init__(
        self, rank: int, scheduler: Scheduler, exchange: Exchange, recorder: Recorder, records: list[Record], capture: Capture | None
    ) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.exchange = exchange
        self.recorder = recorder
        self._records = records
        self._capture = capture
        self._op_id = 0
        self._p2p: dict[tuple[str, int], int] = {}
        self._unsettled: dict[int, tuple[SimWork, int]] = {}

    def issue(self, group: SimProcessGroup, call: Call, whole_inputs: Sequence[Tensor]) -> SimWork:
        """Take part in a collective."""
        self.scheduler.admit(self.rank)
        number = self.exchange.next_number(group.key, group.members, group.group_rank)
        watch: Watch | None = None
        index, record = self._record(group, call, whole_inputs, number=number)
        with PlainTensors():
            if call.is_async or call.kind not in REDUCING:
                # A peer may take its result after this rank has gone on and changed its tensors.
                own, call = call, replace(call, inputs=[tensor.clone() for tensor in call.inputs])
                if call.is_async:
                    poison_outputs(own, whole_inputs)
                    watch = Watch(own, call.inputs)
        meeting = self.exchange.join(group.key, group.group_rank, call, record)

        def deliver() -> None:
            if watch is not None and watch.touched():
                self._add_hazard(index, "written in flight")
            self._write(call.outputs, meeting.result_of(group.group_rank))

        return self._work(SimWork(self, meeting, deliver, call.outputs), index, call.is_async)

    def send(self, group: SimProcessGroup, tensor: Tensor, destination: int, tag: int) -> SimWork:
        """Offer a message to a group rank."""
        self.scheduler.admit(self.rank)
        peer = group.members[destination]
        call = Call("send", [tensor], [], root=destination, is_async=True)
        index, record = self._record(group, call, [tensor], p2p=self._next_p2p(group, destination))
        with PlainTensors():
            copy = tensor.clone()
            watch = Watch(call, [copy])
        message = self.exchange.post_send(group.key, group.members, record, (self.rank, peer), tag, copy)

        def deliver() -> None:
            if watch.touched():
                self._add_hazard(index, "written in flight")

        return self._work(SimWork(self, message, deliver), index, is_async=True)

    def recv(self, group: SimProcessGroup, tensor: Tensor, source: int | None, tag: int) -> SimWork:
        """Ask for a message from a group rank, or from any."""
        self.scheduler.admit(self.rank)
        peer = -1 if source is None else group.members[source]
        call = Call("recv", [], [tensor], root=source, is_async=True)
        index, record = self._record(group, call, [], p2p=self._next_p2p(group, -1 if source is None else source))
        with PlainTensors():
            poison_outputs(call, [])
            watch = Watch(call, [])
        message = self.exchange.post_recv(group.key, group.members, record, (peer, self.rank), tag)

        def deliver() -> None:
            if watch.touched():
                self._add_hazard(index, "written in flight")
            if message.sent is not None:
                self._write([tensor], [message.sent])
            work.source = group.members.index(message.source)

        work = RecvWork(self, message, deliver, [tensor])
        self._work(work, index, is_async=True)
        return work

    def all_of(self, works: Sequence[SimWork]) -> SimWork:
        """One handle for a batch."""

        def wait() -> None:
            for work in works:
                work.held = False
                work.wait()

        return SimWork(self, None, wait)

    def settled(self, work: SimWork) -> None:
        """A handle has been waited for."""
        self._unsettled.pop(id(work), None)

    def finish(self) -> None:
        """The rank's program has returned: whatever was not waited for never will be."""
        for _, index in self._unsettled.values():
            self._add_hazard(index, "never waited")

    def release(self) -> None:
        """Let go of the run's modules and records: PyTorch keeps DTensors' meshes for good, and with them their groups and this."""
        self.recorder, self._records = Recorder(), []
        self._unsettled.clear()

    def discard(self) -> None:
        """Give up whatever is in flight, also in c10d's registry of what functional collectives have promised."""
        for work, _ in list(self._unsettled.values()):
            for output in work.drop() if torch._C._distributed_c10d._get_work_registry_size() else ():
                torch.ops._c10d_functional.wait_tensor(output)
        self._unsettled.clear()

    def _work(self, work: SimWork, index: int, is_async: bool) -> SimWork:
        if is_async:
            # Also keeps the handle alive: c10d's C++ side does not.
            self._unsettled[id(work)] = (work, index)
        else:
            work.wait()
        return work

    def _write(self, outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        each = len(values) // len(outputs) if outputs else 0
        with PlainTensors():
            for position, output in enumerate(outputs):
                parts = values[position * each : (position + 1) * each]
                whole = parts[0] if each == 1 else torch.cat([part.reshape(-1) for part in parts])
                output.copy_(whole if whole.shape == output.shape else whole.reshape(output.shape))

    def _next_p2p(self, group: SimProcessGroup, peer: int) -> int:
        key = (group.key, peer)
        self._p2p[key] = self._p2p.get(key, 0) + 1
        return self._p2p[key]

    def _add_hazard(self, index: int, hazard: str) -> None:
        record = self._records[index]
        self._records[index] = replace(record, hazards=(*record.hazards, hazard))

    def _record(
        self, group: SimProcessGroup, call: Call, whole_inputs: Sequence[Tensor], number: int = 0, p2p: int = 0
    ) -> tuple[int, Record]:
        phase, module = self.recorder.position()
        read = [_described(tensor) for tensor in whole_inputs]
        written = read if call.outputs is whole_inputs else [_described(tensor) for tensor in call.outputs]
        record = Record(
            op_id=self._op_id,
            rank=self.rank,
            kind=call.kind,
            process_group=(group.group_name, group.group_desc),
            group_ranks=group.members,
            collective_seq_id=number,
            p2p_seq_id=p2p,
            input_sizes=tuple(each.shape for each in read),
            input_dtypes=tuple(each.dtype for each in read),
            output_sizes=tuple(each.shape for each in written),
            output_dtypes=tuple(each.dtype for each in written),
            reduce_op=call.reduce_op,
            root=call.root,
            phase=phase,
            module=module,
            call_sites=call_sites(),
            is_async=call.is_async,
            nbytes=max(sum(each.nbytes for each in read), sum(each.nbytes for each in written)),
            elements=max(sum(each.elements for each in read), sum(each.elements for each in written)),
            hazards=() if all(each.contiguous for each in (*read, *written)) else ("non-contiguous",),
        )
        if self._capture is not None and self._capture(record):
            with PlainTensors():
                record = replace(record, payload=tuple(t.detach().to("cpu", copy=True) for t in whole_inputs))
        self._op_id += 1
        self._records.append(record)
        return len(self._records) - 1, record


class _Described(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    elements: int
    nbytes: int
    contiguous: bool


def _described(tensor: Tensor) -> _Described:
    elements = tensor.numel()
    return _Described(tuple(tensor.shape), _dtype_name(tensor.dtype), elements, elements * tensor.element_size(), tensor.is_contiguous())


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
