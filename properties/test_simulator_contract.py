"""What the simulator does on purpose to code that only works by luck: poison, no aliasing, hazards on record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpverify.simulator.world import Simulation, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")


def run(program: Callable[[int], Any], world_size: int = 2, **options: Any) -> Simulation:
    return simulate(lambda: program(dist.get_rank()), world_size, **options)


def hazards(simulation: Simulation) -> set[str]:
    return {hazard for record in simulation.ledger for hazard in record.hazards}


def poisoned(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().all())
    return bool((tensor == (255 if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).min)).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_results_are_not_readable_before_wait(dtype: torch.dtype) -> None:
    def start(kind: str, rank: int) -> tuple[dist.Work, Tensor]:
        x, wide, one = torch.ones(4, dtype=dtype), torch.ones(8, dtype=dtype), torch.ones(2, dtype=dtype)
        calls: dict[str, Callable[[], tuple[Any, Tensor]]] = {
            "all_reduce": lambda: (dist.all_reduce(x, async_op=True), x),
            "all_gather": lambda: (dist.all_gather_into_tensor(wide, x, async_op=True), wide),
            "reduce_scatter": lambda: (dist.reduce_scatter_tensor(one, x, async_op=True), one),
            "all_to_all": lambda: (dist.all_to_all_single(wide, torch.ones(8, dtype=dtype), async_op=True), wide),
            "recv": lambda: (dist.irecv(x, 1 - rank), x),
        }
        return calls[kind]()

    def program(rank: int) -> None:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "recv"):
            work, output = start(kind, rank)
            assert poisoned(output), kind
            if kind == "recv":
                dist.isend(torch.ones(4, dtype=dtype), 1 - rank).wait()
            dist.barrier()  # complete now, still not delivered
            assert poisoned(output), kind
            work.wait()
            assert not poisoned(output), kind
            assert work.is_completed()

    assert not hazards(run(program))


def test_a_root_may_read_what_it_broadcasts_and_a_non_root_what_it_reduces() -> None:
    def program(rank: int) -> None:
        x, y = torch.tensor([1.0 + rank]), torch.tensor([1.0 + rank])
        works = [dist.broadcast(x, 0, async_op=True), dist.reduce(y, 0, async_op=True)]
        assert bool(x.isnan()) == (rank == 1)
        assert bool(y.isnan()) == (rank == 0)
        for work in works:
            work.wait()
        assert x == 1.0
        assert y == (3.0 if rank == 0 else 2.0)

    assert not hazards(run(program))


def test_inputs_keep_their_values_and_results_share_no_memory() -> None:
    kept: list[Tensor] = []

    def program(rank: int) -> None:
        x = torch.tensor([1.0, 2.0]) + rank
        parts = [torch.zeros(2) for _ in range(2)]
        whole, piece, swapped, sent = torch.zeros(4), torch.zeros(1), torch.zeros(2), torch.zeros(2)
        dist.all_gather(parts, x)
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(piece, x)
        dist.all_to_all_single(swapped, x)
        dist.scatter(sent, [x, x] if rank == 0 else None, src=0)
        assert torch.equal(x, torch.tensor([1.0, 2.0]) + rank)
        assert x._version == 0
        kept.extend([x, whole, piece, swapped, sent, *parts])

    run(program)
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == len(kept)


def test_a_rank_that_goes_on_first_cannot_change_what_its_peers_receive() -> None:
    def program(rank: int) -> list[float]:
        x, parts = torch.tensor([float(rank)]), [torch.zeros(1) for _ in range(3)]
        dist.all_gather(parts, x)
        x.fill_(99.0)
        sent = torch.tensor([float(rank)])
        dist.broadcast(sent, 2)
        if rank == 2:
            sent.fill_(99.0)
        dist.barrier()
        return [part.item() for part in parts] + ([] if rank == 2 else [sent.item()])

    for schedule in range(6):
        assert run(program, 3, schedule=schedule).results == [[0.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0]]


@pytest.mark.parametrize("buffer", ["input", "output", "in place", "sent", "received"])
def test_a_write_in_flight_is_recorded(buffer: str) -> None:
    def program(rank: int) -> None:
        x, out = torch.ones(2), torch.ones(4)
        if buffer in ("sent", "received"):
            works = [dist.isend(x, 1 - rank), dist.irecv(out[:2], 1 - rank)]
            (x if buffer == "sent" else out).mul_(0.5).nan_to_num_(7.0)
        elif buffer == "in place":
            works = [dist.all_reduce(x, async_op=True)]
            x.zero_()
        else:
            works = [dist.all_gather_into_tensor(out, x, async_op=True)]
            (x if buffer == "input" else out).zero_()
        for work in works:
            work.wait()
        assert torch.equal(x, torch.full((2,), {"in place": 2.0, "input": 0.0, "sent": 0.5}.get(buffer, 1.0)))

    assert hazards(run(program)) == {"written in flight"}


def test_a_write_beside_a_buffer_in_flight_is_no_hazard() -> None:
    def program(rank: int) -> None:
        flat = torch.ones(6)
        works = [dist.all_reduce(part, async_op=True) for part in flat.chunk(3)]
        for work in works:
            work.wait()
        assert torch.equal(flat, torch.full((6,), 2.0))

    assert not hazards(run(program))


def test_a_handle_never_waited_for_and_a_message_never_received_are_recorded() -> None:
    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(1), async_op=True)
        if rank == 0:
            dist.isend(torch.ones(1), 1)

    simulation = run(program)
    assert [record.hazards for record in simulation.ledger if record.kind == "all_reduce"] == [("never waited",)] * 2
    assert [record.hazards for record in simulation.ledger if record.kind == "send"] == [("never waited", "never received")]


def test_all_reduce_over_a_saved_tensor_raises_in_backward() -> None:
    def program(rank: int) -> str:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()  # saves its result
        dist.all_reduce(y.detach() if rank < 0 else y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        return "raised"

    assert run(program).results == ["raised"] * 2


def test_broadcast_leaves_the_roots_own_tensor_alone() -> None:
    def program(rank: int) -> bool:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        dist.broadcast(y, 0)
        try:
            y.sum().backward()
        except RuntimeError:
            return False
        return True

    assert run(program).results == [True, False]


def test_a_batch_issues_all_before_any_waits() -> None:
    def program(rank: int) -> float:
        mine, other = torch.tensor([float(rank)]), torch.zeros(1)
        total = torch.ones(1)
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.send(mine, 1 - rank)
            dist.recv(other, 1 - rank)
            dist.broadcast(total.mul_(1.0 + rank), 1)
        assert total == 2.0
        return other.item()

    simulation = run(program)
    assert simulation.results == [1.0, 0.0]
    assert not hazards(simulation)


def test_the_coalesced_fast_path() -> None:
    def program(rank: int) -> None:
        a, b = torch.ones(2), torch.ones(3) * rank
        with dist._coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        assert torch.equal(torch.cat([a, b]), torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0]))
        wide, narrow = [torch.zeros(4), torch.zeros(2)], [torch.zeros(1), torch.zeros(2)]
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_gather_into_tensor(wide[0], torch.ones(2) + rank)
            dist.all_gather_into_tensor(wide[1], torch.ones(1) * rank)
        assert all(poisoned(tensor) for tensor in wide)
        manager.wait()
        assert [tensor.tolist() for tensor in wide] == [[1.0, 1.0, 2.0, 2.0], [0.0, 1.0]]
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(narrow[0], torch.arange(2.0))
            dist.reduce_scatter_tensor(narrow[1], torch.arange(4.0))
        assert [tensor.tolist() for tensor in narrow] == ([[0.0], [0.0, 2.0]] if rank == 0 else [[2.0], [4.0, 6.0]])

    assert not hazards(run(program))


def test_polling_lets_the_peers_run() -> None:
    def program(rank: int) -> int:
        x, polls = torch.ones(1), 0
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            polls += 1
        assert x == 2.0
        return polls

    assert run(program).results[0] <= 1


def test_a_future_and_a_result_hold_the_outputs() -> None:
    def program(rank: int) -> None:
        x = torch.ones(2)
        assert dist.all_reduce(x, async_op=True).get_future().wait()[0] is x
        assert dist.all_reduce(x, async_op=True).result()[0] is x
        assert torch.equal(x, torch.full((2,), 4.0))

    run(program)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), "integer or bool tensor for BAND"),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG), "numeric tensor for AVG"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)), "output of all_gather to have 4 elements"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(2)), "input of reduce_scatter to have 6 elements"),
        (lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2).double()), "one dtype"),
        (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), "2 output tensors of all_gather"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "divide by the group size 2"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [1, 1]), "add up to 3 rows"),
    ],
)
def test_calls_that_no_backend_defines_are_refused(call: Callable[[], Any], message: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()

    run(program)


def test_a_helper_thread_may_ask_for_the_rank_but_not_communicate() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def program(rank: int) -> int:
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(RuntimeError, match="own thread"):
                pool.submit(dist.all_reduce, torch.ones(1)).result()
            return pool.submit(dist.get_rank).result()

    assert run(program).results == [0, 1]


class Seen(TorchDispatchMode):
    """Keeps the names of the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send and recv"])
def test_dispatch_modes_of_a_rank_see_its_own_operations_only(kind: str, is_async: bool) -> None:
    def program(rank: int) -> list[str]:
        x, wide, one = torch.ones(4), torch.ones(8), torch.ones(2)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(x, async_op=is_async),
            "all_gather": lambda: dist.all_gather_into_tensor(wide, x, async_op=is_async),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(one, x, async_op=is_async),
            "all_to_all": lambda: dist.all_to_all_single(wide, wide.clone(), async_op=is_async),
            "broadcast": lambda: dist.broadcast(x, 0, async_op=is_async),
            "send and recv": lambda: dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0),
        }
        with Seen() as seen:
            x.add_(1)
            work = calls[kind]()
            if work is not None:
                work.wait()
        return [name for name in seen.names if name != "aten.clone.default"] if kind == "all_to_all" else seen.names

    assert run(program).results == [["aten.add_.Tensor"]] * 2


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "async", "send", "recv"])
def test_tensors_that_hold_no_numbers_are_refused(kind: str) -> None:
    def program(rank: int) -> None:
        with FakeTensorMode():
            x, wide = torch.ones(4), torch.ones(8)
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce": lambda: dist.all_reduce(x),
                "all_gather": lambda: dist.all_gather_into_tensor(wide, x),
                "async": lambda: dist.all_reduce(x, async_op=True),
                "send": lambda: dist.send(x, 1 - rank),
                "recv": lambda: dist.recv(x, 1 - rank),
            }
            with pytest.raises(ValueError, match="Expected a tensor that holds numbers but got a FakeTensor"):
                calls[kind]()

    run(program)


def test_empty_tensors_and_subclasses_with_numbers_are_taken() -> None:
    class Named(torch.Tensor):
        pass

    def program(rank: int) -> list[float]:
        dist.all_reduce(torch.ones(0))
        named = torch.ones(2).as_subclass(Named)
        dist.all_reduce(named)
        parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        dist.all_reduce(parameter)
        return [*named.tolist(), *parameter.tolist()]

    assert run(program).results == [[2.0] * 4] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_what_torch_cannot_compute_is_an_error_on_every_rank(is_async: bool) -> None:
    def reduce(tensor: torch.Tensor) -> None:
        work = dist.all_reduce(tensor, async_op=is_async)
        if work is not None:
            work.wait()

    def program() -> tuple[str, float]:
        with pytest.raises(RuntimeError, match="Expected a collective that torch can compute but it raised NotImplementedError") as raised:
            reduce(torch.ones(4).to(torch.float8_e4m3fn))
        ones = torch.ones(1)
        reduce(ones)  # the next one meets again
        return str(raised.value.__cause__), ones.item()

    found = simulate(program, 3).results
    assert {number for _, number in found} == {3.0} and all("Float8" in cause for cause, _ in found)
