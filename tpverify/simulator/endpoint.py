"""One rank's side of every collective: records it, takes copies, poisons buffers, waits, writes results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.ledger.record import Record
from tpverify.simulator.exchange import Call, Exchange, Meeting, Message
from tpverify.simulator.recorder import Recorder, call_sites
from tpverify.simulator.scheduler import Scheduler

if TYPE_CHECKING:
    from tpverify.simulator.process_group import SimProcessGroup

Capture = Callable[[Record], bool]


class SimWork(dist.Work):
    """Handle of one collective; results are written when it is waited for."""

    def __init__(self, endpoint: Endpoint, pending: Meeting | Message | None, deliver: Callable[[], None]) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._pending = pending
        self._deliver: Callable[[], None] | None = deliver

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until complete, then write the results."""
        if self._deliver is not None:
            if self._pending is not None:
                self._endpoint.scheduler.wait_until(self._endpoint.rank, self._pending)
            deliver, self._deliver, self._pending = self._deliver, None, None
            self._endpoint.settled(self)
            deliver()
        return True

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

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future: asking for it waits, because a callback would run on no rank's turn."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class Endpoint:
    """What one rank's process groups share.

    Args:
        rank: global rank.
        scheduler, exchange, recorder: of this world and rank.
        records: the world's ledger, appended to.
        capture: records whose input tensors are kept as ``payload``.
    """

    def __init__(self, rank: int, scheduler: Scheduler, exchange: Exchange, recorder: Recorder, records: list[Record], capture: Capture | None) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.recorder = recorder
        self._exchange = exchange
        self._records = records
        self._capture = capture
        self._op_id = 0
        self._p2p: dict[tuple[str, int], int] = {}
        self._unsettled: dict[int, tuple[SimWork, int]] = {}

    def issue(self, group: SimProcessGroup, call: Call, whole_inputs: Sequence[Tensor]) -> SimWork:
        """Take part in a collective."""
        number = self._exchange.next_number(group.sim_name, group.members, group.group_rank)
        with torch.no_grad(), _PlainTensors():
            index, record = self._record(group, call, whole_inputs, number=number)
            versions: list[tuple[Tensor, int]] = []
            if call.is_async:
                own, call = call, replace(call, inputs=[tensor.clone() for tensor in call.inputs])
                _poison_outputs(own, whole_inputs, group.group_rank)
                versions = [(tensor, tensor._version) for tensor in (*whole_inputs, *own.outputs) if not tensor.is_inference()]
        meeting = self._exchange.join(group.sim_name, group.group_rank, call, record)

        def deliver() -> None:
            if any(tensor._version != version for tensor, version in versions):
                self._add_hazard(index, "written in flight")
            if meeting.results is not None:
                self._write(call.outputs, meeting.results[group.group_rank])

        return self._work(meeting, deliver, index, call.is_async)

    def send(self, group: SimProcessGroup, tensor: Tensor, destination: int, tag: int) -> SimWork:
        """Offer a message to a group rank."""
        peer = group.members[destination]
        call = Call("send", [tensor], [], root=destination, is_async=True)
        with torch.no_grad(), _PlainTensors():
            index, record = self._record(group, call, [tensor], p2p=self._next_p2p(group, destination))
            copy = tensor.clone()
        message = self._exchange.post_send(group.sim_name, group.members, record, (self.rank, peer), tag, copy)
        return self._work(message, lambda: None, index, is_async=True)

    def recv(self, group: SimProcessGroup, tensor: Tensor, source: int | None, tag: int) -> SimWork:
        """Ask for a message from a group rank, or from any."""
        peer = -1 if source is None else group.members[source]
        call = Call("recv", [], [tensor], root=source, is_async=True)
        with torch.no_grad(), _PlainTensors():
            index, record = self._record(group, call, [], p2p=self._next_p2p(group, -1 if source is None else source))
            _poison(tensor)
        message = self._exchange.post_recv(group.sim_name, group.members, record, (peer, self.rank), tag)

        def deliver() -> None:
            if message.sent is not None:
                self._write([tensor], [message.sent])
            work._source = group.members.index(message.source)

        work = _RecvWork(self, message, deliver)
        self._unsettled[id(work)] = (work, index)
        return work

    def all_of(self, works: Sequence[dist.Work]) -> SimWork:
        """One handle for several."""

        def wait() -> None:
            for work in works:
                work.wait()

        return SimWork(self, None, wait)

    def settled(self, work: SimWork) -> None:
        """A handle has been waited for."""
        self._unsettled.pop(id(work), None)

    def finish(self) -> None:
        """The rank's program has returned: whatever was not waited for never will be."""
        for _, index in self._unsettled.values():
            self._add_hazard(index, "never waited")

    def _work(self, pending: Meeting | Message, deliver: Callable[[], None], index: int, is_async: bool) -> SimWork:
        work = SimWork(self, pending, deliver)
        if is_async:
            self._unsettled[id(work)] = (work, index)
        else:
            work.wait()
        return work

    def _write(self, outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        each = len(values) // len(outputs) if outputs else 0
        with torch.no_grad(), _PlainTensors():
            for position, output in enumerate(outputs):
                parts = values[position * each : (position + 1) * each]
                whole = parts[0] if each == 1 else torch.cat([part.reshape(-1) for part in parts])
                output.copy_(whole.reshape(output.shape))

    def _next_p2p(self, group: SimProcessGroup, peer: int) -> int:
        key = (group.sim_name, peer)
        self._p2p[key] = self._p2p.get(key, 0) + 1
        return self._p2p[key]

    def _add_hazard(self, index: int, hazard: str) -> None:
        record = self._records[index]
        self._records[index] = replace(record, hazards=(*record.hazards, hazard))

    def _record(self, group: SimProcessGroup, call: Call, whole_inputs: Sequence[Tensor], number: int = 0, p2p: int = 0) -> tuple[int, Record]:
        phase, module = self.recorder.position()
        touched = (*whole_inputs, *call.outputs)
        read, written = sum(t.numel() for t in whole_inputs), sum(t.numel() for t in call.outputs)
        read_bytes = sum(t.numel() * t.element_size() for t in whole_inputs)
        written_bytes = sum(t.numel() * t.element_size() for t in call.outputs)
        record = Record(
            op_id=self._op_id,
            rank=self.rank,
            kind=call.kind,
            process_group=(group.sim_name, group.group_desc),
            group_ranks=group.members,
            collective_seq_id=number,
            p2p_seq_id=p2p,
            input_sizes=tuple(tuple(t.shape) for t in whole_inputs),
            input_dtypes=tuple(_dtype_name(t) for t in whole_inputs),
            output_sizes=tuple(tuple(t.shape) for t in call.outputs),
            output_dtypes=tuple(_dtype_name(t) for t in call.outputs),
            reduce_op=call.reduce_op,
            root=call.root,
            phase=phase,
            module=module,
            call_sites=call_sites(),
            is_async=call.is_async,
            nbytes=max(read_bytes, written_bytes),
            elements=max(read, written),
            hazards=() if all(t.is_contiguous() for t in touched) else ("non-contiguous",),
        )
        if self._capture is not None and self._capture(record):
            record = replace(record, payload=tuple(t.detach().clone() for t in whole_inputs))
        self._op_id += 1
        self._records.append(record)
        return len(self._records) - 1, record


class _RecvWork(SimWork):
    _source = -1

    def _source_rank(self) -> int:
        return self._source

    def source_rank(self) -> int:
        """The group rank the message came from."""
        return self._source


class _PlainTensors:
    """Our own tensor operations are not the user's: hide them from Python dispatch modes."""

    def __enter__(self) -> None:
        self._guard = torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        del self._guard


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _poison(tensor: Tensor) -> None:
    """Fill with a value that shows when it is used: NaN, the lowest integer, or the opposite of a boolean."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype != torch.uint8 else 255)


def _poison_outputs(call: Call, inputs: Sequence[Tensor], group_rank: int) -> None:
    """Poison what will be written, but never what the API leaves readable while in flight."""
    if call.kind in ("broadcast", "reduce") and (call.root == group_rank) == (call.kind == "broadcast"):
        return
    in_place = call.kind in ("all_reduce", "broadcast", "reduce")
    storages = set() if in_place else {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    for output in call.outputs:
        if not output.numel() or output.untyped_storage().data_ptr() not in storages:
            _poison(output)
