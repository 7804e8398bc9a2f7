"""Runs a function on simulated ranks, inside an initialised torch.distributed world, and cleans up after it."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpverify.errors import CaseError, RankError, SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record
from tpverify.simulator.collectives import REDUCTION_ORDERS
from tpverify.simulator.endpoint import Capture, Endpoint
from tpverify.simulator.exchange import Exchange
from tpverify.simulator.process_group import SimProcessGroup
from tpverify.simulator.rank_state import RankState
from tpverify.simulator.recorder import Recorder, hooks, recording
from tpverify.simulator.scheduler import Scheduler
from tpverify.simulator.store import RankStore, SharedKeys

DEFAULT_TIMEOUT = 300.0
BACKEND = "sim"


@dataclass(frozen=True)
class Simulation:
    """What a simulated run produced.

    Attributes:
        results: what the function returned, by rank.
        ledger: every collective of every rank.
    """

    results: list[Any]
    ledger: Ledger


_lock = threading.Lock()
_endpoints: list[Endpoint] = []
_inside = threading.local()


def simulate(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    seed: int = 0,
    timeout: float = DEFAULT_TIMEOUT,
    rank_local: Sequence[str] = (),
    reduction_order: str = "rank",
    schedule: int | None = None,
    capture: Capture | None = None,
) -> Simulation:
    """Run ``fn(*args)`` once per rank, inside an initialised ``torch.distributed`` world of ``world_size`` ranks.

    One rank runs at a time, so the run is deterministic. Whatever backend the function names, its groups are simulated.

    Args:
        fn: the rank program; asks ``torch.distributed`` for its rank as usual.
        world_size: number of ranks, at least 1.
        args: arguments, the same objects on every rank.
        seed: state of torch's CPU generator on every rank.
        timeout: seconds after which a run that has not ended is stopped.
        rank_local: names of modules whose global variables belong to a rank.
        reduction_order: order in which partial sums are added: ``rank``, ``reversed`` or ``tree``.
        schedule: None = ranks run in turn; an integer seeds another order.
        capture: records whose inputs are kept as ``Record.payload``.

    Raises:
        RankError: a rank raised.
        CollectiveMismatch: ranks disagree about a collective.
        Deadlock: no rank can go on.
        RankTimeout: the timeout passed.
        CaseError: an argument is out of range.
    """
    ledger, results, failure = run_world(
        fn, world_size, args=args, seed=seed, timeout=timeout, rank_local=rank_local, reduction_order=reduction_order, schedule=schedule, capture=capture
    )
    if failure is not None:
        raise failure from getattr(failure, "exception", None)
    return Simulation(results, ledger)


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any],
    seed: int,
    timeout: float,
    rank_local: Sequence[str] = (),
    reduction_order: str = "rank",
    schedule: int | None = None,
    capture: Capture | None = None,
) -> tuple[Ledger, list[Any], SimulationError | None]:
    """:func:`simulate`, but a failure is returned, with the ledger up to it."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise CaseError(f"Expected a world size of at least 1 but got world_size={world_size!r}")
    if reduction_order not in REDUCTION_ORDERS:
        raise CaseError(f"Expected one of {', '.join(REDUCTION_ORDERS)} but got reduction_order={reduction_order!r}")
    if getattr(_inside, "rank", None) is not None:
        raise CaseError(f"Expected simulate() outside a simulated rank but it was called on rank {_inside.rank}: simulations do not nest")
    results: list[Any] = [None] * world_size
    records: list[Record] = []
    failure: SimulationError | None = None
    with _lock, contextlib.ExitStack() as stack:
        state = RankState(world_size, seed, rank_local)
        stack.enter_context(state.outside())
        stack.enter_context(_patched_c10d())
        stack.enter_context(hooks())
        scheduler = Scheduler(world_size, state, schedule)
        exchange = Exchange(scheduler, reduction_order)
        keys = SharedKeys(scheduler)
        _endpoints[:] = [Endpoint(rank, scheduler, exchange, Recorder(), records, capture) for rank in range(world_size)]
        stack.callback(_endpoints.clear)
        programs = [_program(fn, args, rank, world_size, keys, results) for rank in range(world_size)]
        try:
            scheduler.run(programs, timeout)
        except SimulationError as error:
            failure = _with_traceback(error)
        unreceived = {(record.rank, record.op_id) for record in exchange.unreceived()} if failure is None else set()
    marked = (replace(r, hazards=(*r.hazards, "never received")) if (r.rank, r.op_id) in unreceived else r for r in records)
    return Ledger(marked), results, failure


def _program(fn: Callable[..., Any], args: Sequence[Any], rank: int, world_size: int, keys: SharedKeys, results: list[Any]) -> Callable[[], None]:
    def program() -> None:
        endpoint = _endpoints[rank]
        _inside.rank = rank
        with recording(endpoint.recorder):
            _initialise(keys, rank, world_size)
            try:
                results[rank] = fn(*args)
                endpoint.finish()
            finally:
                torch._C._distributed_c10d._unregister_all_process_groups()

    return program


def _initialise(keys: SharedKeys, rank: int, world_size: int) -> None:
    dist.init_process_group(BACKEND, store=RankStore(keys, rank), rank=rank, world_size=world_size)


def _create_group(options: Any, backend_options: Any) -> SimProcessGroup:
    """c10d's hook: build one rank's view of a new group."""
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    rank = members[options.group_rank]
    return SimProcessGroup(_endpoints[rank], options.group_id, options.group_rank, members)


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])


@contextlib.contextmanager
def _patched_c10d() -> Iterator[None]:
    """On ranks every backend means the simulator, and initialising an initialised world is no error."""
    create, initialise, excepthook = c10d._new_process_group_helper, dist.init_process_group, sys.excepthook

    def create_simulated(group_size: int, group_rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        on_rank = getattr(_inside, "rank", None) is not None
        return create(group_size, group_rank, ranks, dist.Backend(BACKEND) if on_rank else backend, *args, **kwargs)

    def initialise_once(*args: Any, **kwargs: Any) -> None:
        if getattr(_inside, "rank", None) is None or c10d._world.default_pg is None:
            initialise(*args, **kwargs)

    c10d._new_process_group_helper = create_simulated
    c10d.init_process_group = dist.init_process_group = initialise_once
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*backend registration.*")
            yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = excepthook  # initialising a world replaces it
        c10d._new_process_group_helper = create
        c10d.init_process_group = dist.init_process_group = initialise


def _with_traceback(error: SimulationError) -> SimulationError:
    """Show the failing rank's own traceback, without our frames, in the message."""
    if not isinstance(error, RankError):
        return error
    exception = error.exception
    frames = [frame for frame in traceback.extract_tb(exception.__traceback__) if "/tpverify/simulator/" not in frame.filename]
    text = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(type(exception), exception))
    return RankError(f"rank {error.rank} raised {type(exception).__name__}\n{text.rstrip()}", error.rank, exception)
