"""What processes say to each other: plain data and tensors, nothing else; and a collective starts only when it may."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

import tpverify as tpv
from tpverify.ledger.record import CallSite, Record
from tpverify.processes.channel import Channel
from tpverify.processes.codec import DTYPES, decode, encode
from tpverify.processes.devices import device_for
from tpverify.processes.errors_as_data import described, rebuilt
from tpverify.processes.recorded_group import Announcer, RecordedEndpoint, RecordedProcessGroup, batched_messages
from tpverify.run import ModuleCall, Placed, RankRun
from tpverify.simulator.exchange import Call
from tpverify.simulator.failures import rank_error
from tpverify.simulator.recorder import Recorder

RECORD = Record(
    op_id=0,
    rank=1,
    kind="all_reduce",
    process_group=("0", "default_pg"),
    group_ranks=(0, 1),
    collective_seq_id=1,
    p2p_seq_id=0,
    input_sizes=((2,),),
    input_dtypes=("float64",),
    output_sizes=((2,),),
    output_dtypes=("float64",),
    reduce_op="SUM",
    root=None,
    phase="forward",
    module="",
    call_sites=(CallSite("a.py", 1, "f"),),
    is_async=False,
    nbytes=16,
    elements=2,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.arange(6).reshape(3, 2).t()[:2].to(dtype) if len(shape) == 2 and shape[0] else torch.ones(shape).to(dtype)
    first, received = decode(encode([torch.ones(1), sent]))
    assert received.dtype == dtype and received.shape == sent.shape
    assert torch.equal(received, sent) and torch.equal(first, torch.ones(1))


def test_nan_and_negative_zero_arrive() -> None:
    sent = torch.tensor([float("nan"), -0.0, float("-inf")], dtype=torch.float64)
    assert torch.equal(decode(encode(sent)).view(torch.int64), sent.view(torch.int64))


@pytest.mark.parametrize(
    "value",
    [
        None,
        ("a", 1, 2.5, True, [()]),
        {"a": {"b": (1,)}, "!": "tensor"},
        RECORD,
        tpv.Shard(1),
        tpv.Replicate(),
        tpv.Partial(),
        tpv.UnevenShard(0, "last"),
        tpv.PaddedShard(0, 4),
        tpv.FusedShard(0, (tpv.Block(4, 2), tpv.Block(2))),
        RankRun(outputs={"output": Placed(None, tpv.Shard(0))}, ties=(("a", "b"),), calls={"fc": ModuleCall(None, ())}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_data_and_runs_arrive(value: Any) -> None:
    received = decode(encode(value))
    assert type(received) is type(value) and received == value


@pytest.mark.parametrize("value", [object(), print, {1: 2}, torch.float32, {"a": ValueError("x")}], ids=lambda value: type(value).__name__)
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="Expected"):
        encode(value)


def test_nothing_else_is_built() -> None:
    tree = json.dumps({"!": "Popen", "items": ["true"]}).encode()
    with pytest.raises(ValueError, match="but got 'Popen'"):
        decode(len(tree).to_bytes(8, "big") + tree)


def test_a_tensor_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected 24 bytes"):
        decode(encode(torch.zeros(3, dtype=torch.float64))[:-1])


def test_every_dtype_has_a_name() -> None:
    assert DTYPES["torch.float64"] is torch.float64 and DTYPES["torch.bfloat16"] is torch.bfloat16


def test_gloo_takes_either_device() -> None:
    assert [device_for("gloo", device) for device in (None, "cpu", "cuda")] == ["cpu", "cpu", "cuda"]
    with pytest.raises(tpv.CaseError, match="Expected cpu or cuda for world='gloo' but got device='tpu'"):
        device_for("gloo", "tpu")


class OutOfRangeError(IndexError):
    """A class that the controller does not know."""


@pytest.mark.parametrize(
    ("raised", "nearest", "message"),
    [
        (ValueError("no"), ValueError, "no"),
        (OutOfRangeError("far"), IndexError, "far"),
        (KeyError("k"), KeyError, "k"),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"), UnicodeError, "'utf-8' codec can't decode byte 0x61 in position 0: bad"),
        (tpv.SubjectError("wrong"), tpv.SubjectError, "wrong"),
        (SystemExit(3), SystemExit, "3"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_an_exception_keeps_its_nearest_known_class(raised: BaseException, nearest: type, message: str) -> None:
    error = rebuilt(1, *described(rank_error(1, raised)))
    assert type(error.exception) is nearest and error.exception.args == (message,)
    assert str(error).startswith(f"rank 1 raised {type(raised).__name__}\n")


class Backend:
    """A backend that must be given messages together, as NCCL; notes what it is asked."""

    def __init__(self, grouped: bool) -> None:
        self.asked: list[str] = []
        self.grouped = grouped

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=self.grouped)

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        self.asked.append("end")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    def send(self, *arguments: Any) -> Any:
        """Starts a send."""
        self.asked.append("send")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)

    def recv(self, *arguments: Any) -> Any:
        """Starts a recv."""
        self.asked.append("recv")
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True)


@pytest.fixture
def announcer() -> Iterator[Announcer]:
    """Announces to nobody."""
    ours, theirs = map(Channel, socket.socketpair())
    yield Announcer(ours, queue.SimpleQueue())
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("grouped", "asked"), [(True, ["start", "recv", "send", "end"]), (False, ["recv", "send"])])
@pytest.mark.parametrize("manager", [False, True])
def test_a_batch_of_messages_reaches_the_backend_as_one(
    monkeypatch: pytest.MonkeyPatch, announcer: Announcer, grouped: bool, asked: list[str], manager: bool
) -> None:
    monkeypatch.setattr(c10d, "_check_p2p_op_list", lambda operations: None)
    backend, tensor = Backend(grouped), torch.ones(2)
    group = RecordedProcessGroup(backend, RecordedEndpoint(0, announcer, Recorder(), None), "0", "0/0", 0, (0, 1))
    with batched_messages():
        if manager:
            group._start_coalescing(tensor.device)
        else:
            c10d._check_p2p_op_list([SimpleNamespace(group=group, tensor=tensor)] * 2)
        works = [group.recv([tensor], 1, 0), group.send([tensor], 1, 0)]
        if manager:
            works.append(group._end_coalescing(tensor.device))
    assert backend.asked == asked
    assert all(work.wait() for work in reversed(works))
    group.send([tensor], 1, 0)
    assert backend.asked == [*asked, "send"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_blocking_collective_starts_when_it_is_admitted(is_async: bool) -> None:
    ours, theirs = map(Channel, socket.socketpair())
    admissions: queue.SimpleQueue[None] = queue.SimpleQueue()
    call = Call("all_reduce", [torch.ones(2)], [torch.ones(2)], reduce_op="SUM", is_async=is_async)
    thread = threading.Thread(target=Announcer(ours, admissions).issued, args=("1/0", 1, RECORD, call), daemon=True)
    thread.start()
    message = theirs.receive()
    assert message is not None and message[0] == "issue" and message[3] == RECORD
    thread.join(0.2)
    assert thread.is_alive() == (not is_async)
    admissions.put(None)
    thread.join(5)
    assert not thread.is_alive()
    ours.close()
    assert theirs.receive() is None
    theirs.close()
