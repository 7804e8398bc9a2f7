"""One rank of a bare world, and the process that forks such ranks: plain torch.distributed over the real backend.

The forking process imports torch once, so that ranks that are out of step are replaced in no time. It ends with its controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpverify.conformance.calls import CALLS
from tpverify.conformance.interpreter import run_program
from tpverify.conformance.program import Program
from tpverify.processes.codec import encode

LOOPBACKS = ("lo", "lo0")
FLIGHT_RECORDS = "512"
"""How many collectives the backend's own recorder keeps."""
BACKEND_TIMEOUT = timedelta(seconds=300)
"""Ends ranks that nobody is left to kill."""

Groups = dict[tuple[tuple[int, ...], int], Any]


def serve(connection: Connection, backend: str, rank: int, world_size: int, store: str) -> None:
    """Run programs as one rank until the controller is gone."""
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = FLIGHT_RECORDS
    loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # backends write about what they refuse
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=BACKEND_TIMEOUT)
    connection.send_bytes(b"ready")
    groups: Groups = {}
    seen = -1
    while True:
        answer = _answer(connection.recv(), groups)
        flights = [flight for flight in _flights() if flight["record_id"] > seen]
        seen = max([seen, *(flight["record_id"] for flight in flights)])
        connection.send_bytes(encode({**answer, "flights": json.dumps(flights)}))


def _answer(program: Program, groups: Groups) -> dict[str, Any]:
    taken: Counter[tuple[int, ...]] = Counter()

    def group(members: Sequence[int]) -> Any:
        """Connecting takes longer than most programs: groups over the same ranks are used again, in the same order on every rank."""
        key = (tuple(members), taken[tuple(members)])
        taken[tuple(members)] += 1
        if key not in groups:
            groups[key] = dist.new_group(list(members), group_desc=f"{'-'.join(map(str, members))}/{key[1]}")
        if groups[key] == dist.GroupMember.NON_GROUP_MEMBER:
            # All groups of others are one to torch, which knows the ranks of the newest.
            c10d._world.pg_group_ranks[groups[key]] = {member: place for place, member in enumerate(sorted(members))}
        return groups[key]

    torch.set_default_dtype(torch.float64)
    try:
        return {"outputs": run_program(program, CALLS, group), "refused": (), "message": ""}
    except Exception as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__)
        return {"outputs": {}, "refused": names, "message": str(error)[:1000]}


def _flights() -> list[dict[str, Any]]:
    """What the backend's flight recorder holds, if this release has one that can be asked."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", []) if dump is not None else []
    kept = ("record_id", "profiling_name", "process_group", "is_p2p", "input_sizes", "input_dtypes")
    return [{name: entry[name] for name in kept} for entry in entries]


def main(address: str) -> None:
    """Fork ranks as stdin asks: one JSON list ``[backend, rank, world_size, store]`` a line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        backend, rank, world_size, store = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            with contextlib.suppress(EOFError, ConnectionError), Client(address, "AF_UNIX") as connection:
                connection.send((rank, os.getpid()))
                serve(connection, backend, rank, world_size, store)
            os._exit(0)
        children.append(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
