"""Runs a function on simulated ranks, inside an initialised torch.distributed world, and cleans up after it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only

from tpverify.errors import CaseError, SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record
from tpverify.options import CPU
from tpverify.simulator.c10d_hooks import Rendezvous, current_endpoint, simulated_c10d
from tpverify.simulator.collectives import REDUCTION_ORDERS
from tpverify.simulator.endpoint import Capture, Endpoint
from tpverify.simulator.exchange import Exchange, Perturb
from tpverify.simulator.rank_state import RankState
from tpverify.simulator.recorder import Recorder, hooks, recording
from tpverify.simulator.scheduler import Scheduler
from tpverify.simulator.store import SharedKeys

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class Simulation:
    """What a simulated run produced.

    Attributes:
        results: what the function returned, by rank; promises of functional collectives are waited for.
        ledger: every collective of every rank.
    """

    results: list[Any]
    ledger: Ledger


_lock = threading.RLock()


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Within the block no other thread simulates, or changes what a simulation saves and restores: runs take turns.

    Raises:
        CaseError: on a simulated rank.
    """
    inside = current_endpoint()
    if inside is not None:
        raise CaseError(f"Expected simulate() outside a simulated rank but it was called on rank {inside.rank}: simulations do not nest")
    with _lock:
        yield


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

    One rank runs at a time, so the run is deterministic. Whatever backend the function names, its groups are simulated. On Linux,
    where torch computes in one thread (``OMP_NUM_THREADS=1``), the ranks' threads stay on one core.

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
        CaseError: an argument is out of range, a module cannot be imported, or a rank calls this function.
    """
    __tracebackhide__ = True
    ledger, results, failure = run_world(
        fn,
        world_size,
        args=args,
        seed=seed,
        timeout=timeout,
        rank_local=rank_local,
        reduction_order=reduction_order,
        schedule=schedule,
        capture=capture,
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
    perturb: Perturb | None = None,
    device: str = CPU,
) -> tuple[Ledger, list[Any], SimulationError | None]:
    """:func:`simulate`, but a failure is returned, with the ledger up to it.

    Args:
        perturb: see :class:`tpverify.simulator.exchange.Exchange`.
        device: where the ranks compute; its random generator then is a rank's own too.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise CaseError(f"Expected a world size of at least 1 but got world_size={world_size!r}")
    if reduction_order not in REDUCTION_ORDERS:
        raise CaseError(f"Expected one of {', '.join(REDUCTION_ORDERS)} but got reduction_order={reduction_order!r}")
    if not timeout > 0:
        raise CaseError(f"Expected a timeout of more than 0 seconds but got timeout={timeout!r}")
    results: list[Any] = [None] * world_size
    records: list[Record] = []
    failure: SimulationError | None = None
    with process_state(), contextlib.ExitStack() as stack:
        state = RankState(world_size, seed, rank_local, device)
        stack.enter_context(state.outside())
        stack.enter_context(simulated_c10d())
        stack.enter_context(hooks())
        scheduler = Scheduler(world_size, state, schedule)
        exchange = Exchange(scheduler, reduction_order, perturb)
        endpoints = [Endpoint(rank, scheduler, exchange, Recorder(), records, capture) for rank in range(world_size)]
        rendezvous = Rendezvous(SharedKeys(scheduler), world_size)
        try:
            scheduler.run([_program(fn, args, endpoint, rendezvous, results) for endpoint in endpoints], timeout)
        except SimulationError as error:
            failure = error
        unreceived = {(record.rank, record.op_id) for record in exchange.unreceived()} if failure is None else set()
        for endpoint in endpoints:
            endpoint.release()
    marked = (replace(r, hazards=(*r.hazards, "never received")) if (r.rank, r.op_id) in unreceived else r for r in records)
    return Ledger(marked), results, failure


def _program(
    fn: Callable[..., Any], args: Sequence[Any], endpoint: Endpoint, rendezvous: Rendezvous, results: list[Any]
) -> Callable[[], None]:
    def program() -> None:
        # Backward must stay in this thread: autograd's helper threads for other devices have no rank.
        with rendezvous.on_rank(endpoint), recording(endpoint.recorder), torch.autograd.set_multithreading_enabled(False):
            # A promise that leaves the rank cannot be waited for any more.
            results[endpoint.rank] = tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, fn(*args))
            endpoint.finish()

    return program
