"""One rank in its own process: runs the cases that it is sent, and ends when the controller hangs up."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_map_only

from tpverify.case import Case, parse_case
from tpverify.lookup import config_types, load_subject
from tpverify.processes.backends import Backends
from tpverify.processes.channel import Channel
from tpverify.processes.errors_as_data import described
from tpverify.processes.recorded_group import Announcer, RecordedEndpoint, RecordedProcessGroup, batched_messages
from tpverify.rank_program import group_layouts
from tpverify.run import RankRun
from tpverify.runner import capture_of, rank_program
from tpverify.simulator.c10d_hooks import Rendezvous, simulated_c10d
from tpverify.simulator.endpoint import Endpoint
from tpverify.simulator.failures import rank_error
from tpverify.simulator.process_group import SimProcessGroup
from tpverify.simulator.rank_state import RankState
from tpverify.simulator.rank_world import RankWorld
from tpverify.simulator.recorder import Recorder, call_sites, hooks, recording
from tpverify.subjects.subject import Subject

_bindings: Any = torch._C._distributed_c10d


Store = tuple[str, str, int, str]
"""How the processes find each other: ("file", path, number of processes, "") or ("tcp", host, port, prefix of the keys)."""


@dataclass(frozen=True)
class Machine:
    """What a rank's process knows of its machine.

    Attributes:
        local_rank: the rank's number on this machine; the machine's ranks follow one another.
        ranks: how many ranks it can have.
        variables: of the environment, that its ranks' programs find there.
    """

    local_rank: int
    ranks: int
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """What a launcher would tell the rank of such a world about its machine."""
        here = min(self.ranks, world_size - (rank - self.local_rank))
        return {"LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(here), **self.variables}

    def device(self, kind: str) -> torch.device:
        """Where the rank's tensors are: ranks take one GPU after the other."""
        return torch.device(kind, self.local_rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)


def serve(channel: Channel, rank: int, *, backend: str, device: str, store: Store, machine: Machine) -> None:
    """Run cases until the other end of ``channel`` is gone; never returns.

    The rank's program has a thread of its own, so that this one notices a controller that dies, whatever the program does.

    Args:
        channel: to the controller.
        rank: global rank of this process.
        backend: ``gloo`` or ``nccl``.
        device: ``cpu`` or ``cuda``.
        store: where all ranks' processes meet.
        machine: on which this process runs.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    torch.set_num_threads(1)
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    admissions: queue.SimpleQueue[None] = queue.SimpleQueue()
    backends = Backends(backend, machine.device(device), _connected(store), rank)
    runner = _RankRunner(channel, admissions, rank, backends, machine)
    thread = threading.Thread(target=runner.run_all, args=(tasks,), name=f"rank {rank}", daemon=True)
    thread.start()
    while (message := channel.receive()) is not None:
        if message[0] == "run":
            tasks.put(message[1])
        elif message[0] == "admit":
            admissions.put(None)
        else:
            frame = sys._current_frames().get(thread.ident or 0)
            channel.send("where", [str(site) for site in call_sites(frame)] if frame else [])
    os._exit(0)


class _RankRunner:
    """Runs one case after the other on this process's rank."""

    def __init__(self, channel: Channel, admissions: queue.SimpleQueue[None], rank: int, backends: Backends, machine: Machine) -> None:
        self._channel = channel
        self._admissions = admissions
        self._rank = rank
        self._backends = backends
        self._device = backends.device
        self._machine = machine

    def run_all(self, tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
        """Run cases as they come."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with contextlib.suppress(OSError):  # the controller has hung up, and this process ends
            while True:
                self._answer(tasks.get())

    def _answer(self, task: dict[str, Any]) -> None:
        try:
            subject, case = _loaded(task)
        except Exception as error:
            where = "" if task["place"] else f" on {socket.gethostname()}"
            self._channel.send("unusable", f"{type(error).__name__}{where}: {error}")
            return
        announcer = Announcer(self._channel, self._admissions)
        try:
            self._channel.send("returned", *self._run(subject, case, task, announcer))
        except BaseException as exception:  # noqa: B036 - whatever a rank raises is reported
            self._channel.send("raised", *described(rank_error(self._rank, exception)), announcer.broken)

    def _run(self, subject: Subject, case: Case, task: dict[str, Any], announcer: Announcer) -> tuple[RankRun, list[Any]]:
        world_size = sum(map(len, group_layouts(case)))
        self._backends.start_case()
        # What DTensor has worked out on the meshes of earlier cases, whose groups are gone.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        program = rank_program(subject, case, self._rank, task["traced"])
        state = RankState(world_size, case.seed, subject.rank_local)
        endpoint = RecordedEndpoint(self._rank, announcer, Recorder(), capture_of(subject, case, task["traced"]))
        rendezvous = _Rendezvous(self._backends, announcer, task["number"], world_size)
        with subject.context_for(case.config), state.outside(), simulated_c10d(), batched_messages(), hooks():
            state.enter(self._rank)
            os.environ.update(self._machine.environment(self._rank, world_size))
            if self._device.type == "cuda":
                torch.cuda.manual_seed(case.seed)
            with rendezvous.on_rank(endpoint), recording(endpoint.recorder), torch.autograd.set_multithreading_enabled(False):
                with self._device if self._device.type == "cuda" else contextlib.nullcontext():
                    run: RankRun = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, program())
                endpoint.finish()
        return run, endpoint.payloads()


class _Rendezvous(Rendezvous):
    """Where one rank's process initialises its worlds: on the real backend."""

    def __init__(self, backends: Backends, announcer: Announcer, case: int, world_size: int) -> None:
        self.world_size = world_size
        self._backends = backends
        self.backend = backends.name
        self._announcer = announcer
        self._case = case

    def store(self, rank: int) -> Any:
        """The processes' store, fresh for each case."""
        return _bindings.PrefixStore(f"case{self._case}", self._backends.store)

    def model(self) -> None:
        """No other rank initialises its world in this process."""

    def learn(self, world: RankWorld) -> None:
        """There is nobody who could use it."""

    def group(self, endpoint: Endpoint, name: str, key: str, group_rank: int, members: tuple[int, ...]) -> SimProcessGroup:
        """A recorded group over a real one."""
        inner = self._backends.take(members, lambda: self._announcer.connecting(key))
        return RecordedProcessGroup(inner, endpoint, name, key, group_rank, members)


def _loaded(task: dict[str, Any]) -> tuple[Subject, Case]:
    enter_place(task["place"])
    subject = load_subject(task["subject"])
    return subject, parse_case(task["case"], config_types(subject))


def enter_place(place: tuple[list[str], str] | None) -> None:
    """Import and find files as the controller does; on another machine, as this process was started to."""
    if place is None:
        return
    path, folder = place
    if sys.path != path:
        sys.path[:] = path
    if os.getcwd() != folder:
        os.chdir(folder)


def _connected(store: Store) -> Any:
    kind, where, number, prefix = store
    if kind == "file":
        return _bindings.FileStore(where, number)
    return _bindings.PrefixStore(prefix, _bindings.TCPStore(where, number, is_master=False, wait_for_workers=False))
