"""Values of every simulated collective, against plain formulas over all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpverify.simulator.world import simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
WORLD_SIZES = st.integers(1, 5)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
PROFILE = settings(deadline=None, max_examples=40)


def draw_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Small integers, so that no order of summation rounds; unequal on unequal seeds."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -3
    return torch.randint(low, 4, shape, generator=generator).to(dtype)


def on_all_ranks(world_size: int, program: Callable[[int], Any], **options: Any) -> list[Any]:
    return simulate(lambda: program(dist.get_rank()), world_size, **options).results


def expected_reduction(tensors: list[Tensor], op: str) -> Tensor:
    """Over a stacked copy in int64 or float64: an independent way to the same number."""
    dtype = tensors[0].dtype
    if op in ("BAND", "BOR", "BXOR"):
        values = [tensor.tolist() for tensor in (part.reshape(-1).to(torch.int64) for part in tensors)]
        fold = {"BAND": lambda a, b: a & b, "BOR": lambda a, b: a | b, "BXOR": lambda a, b: a ^ b}[op]
        total = values[0]
        for row in values[1:]:
            total = [fold(a, b) for a, b in zip(total, row, strict=True)]
        return torch.tensor(total, dtype=torch.int64).to(dtype).reshape(tensors[0].shape)
    stacked = torch.stack(tensors).to(torch.float64)
    if op == "SUM":
        return stacked.sum(0).to(dtype) if dtype != torch.bool else stacked.sum(0) > 0
    if op == "AVG":
        return (stacked.sum(0) / len(tensors)).to(dtype) if dtype.is_floating_point else (stacked.sum(0) / len(tensors)).trunc().to(dtype)
    return {"PRODUCT": stacked.prod(0), "MIN": stacked.amin(0), "MAX": stacked.amax(0)}[op].to(dtype)


@st.composite
def reductions(draw: st.DrawFn) -> tuple[str, torch.dtype]:
    op = draw(st.sampled_from(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")))
    if op.startswith("B"):
        return op, draw(st.sampled_from((*INTEGERS, torch.bool)))
    return op, draw(st.sampled_from(DTYPES if op != "AVG" else (*FLOATS, *INTEGERS)))


def reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, name)


def assert_equal(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected), f"{got} != {expected}"


@given(WORLD_SIZES, SHAPES, reductions(), st.booleans())
@PROFILE
def test_all_reduce(world_size: int, shape: tuple[int, ...], reduction: tuple[str, torch.dtype], is_async: bool) -> None:
    op, dtype = reduction
    inputs = [draw_tensor(shape, dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> Tensor:
        x = inputs[rank].clone()
        work = dist.all_reduce(x, reduce_op(op), async_op=is_async)
        if is_async:
            work.wait()
        return x

    for result in on_all_ranks(world_size, program):
        assert_equal(result, expected_reduction(inputs, op))


@given(WORLD_SIZES, SHAPES, reductions(), st.data())
@PROFILE
def test_reduce_and_broadcast(world_size: int, shape: tuple[int, ...], reduction: tuple[str, torch.dtype], data: st.DataObject) -> None:
    op, dtype = reduction
    root = data.draw(st.integers(0, world_size - 1))
    inputs = [draw_tensor(shape, dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> tuple[Tensor, Tensor]:
        reduced, sent = inputs[rank].clone(), inputs[rank].clone()
        dist.reduce(reduced, root, reduce_op(op))
        dist.broadcast(sent, root)
        return reduced, sent

    for rank, (reduced, sent) in enumerate(on_all_ranks(world_size, program)):
        assert_equal(reduced, expected_reduction(inputs, op) if rank == root else inputs[rank])
        assert_equal(sent, inputs[root])


@given(WORLD_SIZES, SHAPES, st.sampled_from(DTYPES), st.booleans())
@PROFILE
def test_all_gather(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, is_async: bool) -> None:
    inputs = [draw_tensor(shape, dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
        x = inputs[rank].clone()
        parts = [torch.zeros(shape, dtype=dtype) for _ in range(world_size)]
        joined = torch.zeros((world_size * shape[0], *shape[1:]) if shape else (world_size,), dtype=dtype)
        stacked = torch.zeros((world_size, *shape), dtype=dtype)
        works = [
            dist.all_gather(parts, x, async_op=is_async),
            dist.all_gather_into_tensor(joined, x, async_op=is_async),
            dist.all_gather_into_tensor(stacked, x, async_op=is_async),
        ]
        for work in reversed(works) if is_async else ():
            work.wait()
        x.zero_()
        return parts, joined, stacked

    for parts, joined, stacked in on_all_ranks(world_size, program):
        for part, expected in zip(parts, inputs, strict=True):
            assert_equal(part, expected)
        assert_equal(joined, torch.cat([x.reshape(x.shape or (1,)) for x in inputs]))
        assert_equal(stacked, torch.stack(inputs))


@given(st.integers(2, 4), st.lists(st.integers(0, 3), min_size=4, max_size=4), st.sampled_from(DTYPES))
@PROFILE
def test_all_gather_of_unequal_sizes(world_size: int, sizes: list[int], dtype: torch.dtype) -> None:
    inputs = [draw_tensor((sizes[rank], 2), dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> list[Tensor]:
        parts = [torch.zeros_like(x) for x in inputs]
        dist.all_gather(parts, inputs[rank])
        return parts

    for parts in on_all_ranks(world_size, program):
        for part, expected in zip(parts, inputs, strict=True):
            assert_equal(part, expected)


@given(WORLD_SIZES, SHAPES, reductions(), st.booleans())
@PROFILE
def test_reduce_scatter(world_size: int, shape: tuple[int, ...], reduction: tuple[str, torch.dtype], is_async: bool) -> None:
    op, dtype = reduction
    inputs = [draw_tensor((world_size, *shape), dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> tuple[Tensor, Tensor]:
        from_tensor, from_list = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        works = [
            dist.reduce_scatter_tensor(from_tensor, inputs[rank].clone(), reduce_op(op), async_op=is_async),
            dist.reduce_scatter(from_list, [chunk.clone() for chunk in inputs[rank]], reduce_op(op), async_op=is_async),
        ]
        for work in reversed(works) if is_async else ():
            work.wait()
        return from_tensor, from_list

    for rank, results in enumerate(on_all_ranks(world_size, program)):
        for result in results:
            assert_equal(result, expected_reduction(inputs, op)[rank])


@given(WORLD_SIZES, SHAPES, st.sampled_from(DTYPES), st.data())
@PROFILE
def test_scatter_and_gather(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    inputs = [draw_tensor(shape, dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> tuple[Tensor, list[Tensor] | None]:
        part = torch.zeros(shape, dtype=dtype)
        dist.scatter(part, [x.clone() for x in inputs] if rank == root else None, src=root)
        parts = [torch.zeros(shape, dtype=dtype) for _ in inputs] if rank == root else None
        dist.gather(part, parts, dst=root)
        part.zero_()
        return inputs[rank], parts

    for rank, (_, parts) in enumerate(on_all_ranks(world_size, program)):
        assert (parts is None) == (rank != root)
        for part, expected in zip(parts or (), inputs, strict=rank == root):
            assert_equal(part, expected)


@given(st.integers(1, 4), st.data(), st.sampled_from(DTYPES))
@PROFILE
def test_all_to_all(world_size: int, data: st.DataObject, dtype: torch.dtype) -> None:
    square = st.lists(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size), min_size=world_size, max_size=world_size)
    rows = data.draw(square)  # rows[source][destination]
    inputs = [draw_tensor((sum(rows[rank]), 2), dtype, rank) for rank in range(world_size)]
    pieces = [x.split(sizes) for x, sizes in zip(inputs, rows, strict=True)]

    def program(rank: int) -> tuple[Tensor, list[Tensor]]:
        received = [rows[source][rank] for source in range(world_size)]
        joined = torch.zeros((sum(received), 2), dtype=dtype)
        dist.all_to_all_single(joined, inputs[rank], received, rows[rank])
        parts = [torch.zeros((size, 2), dtype=dtype) for size in received]
        dist.all_to_all(parts, [piece.clone() for piece in pieces[rank]])
        return joined, parts

    for rank, (joined, parts) in enumerate(on_all_ranks(world_size, program)):
        expected = [pieces[source][rank] for source in range(world_size)]
        assert_equal(joined, torch.cat(expected))
        for part, piece in zip(parts, expected, strict=True):
            assert_equal(part, piece)


@given(st.integers(1, 5), st.sampled_from(FLOATS))
@PROFILE
def test_all_to_all_single_in_equal_parts(world_size: int, dtype: torch.dtype) -> None:
    inputs = [draw_tensor((world_size * 2, 3), dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> Tensor:
        output = torch.zeros_like(inputs[rank])
        dist.all_to_all_single(output, inputs[rank])
        return output

    for rank, output in enumerate(on_all_ranks(world_size, program)):
        assert_equal(output, torch.cat([x[2 * rank : 2 * rank + 2] for x in inputs]))


@given(st.integers(2, 5), SHAPES, st.sampled_from(DTYPES))
@PROFILE
def test_point_to_point_ring(world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [draw_tensor(shape, dtype, rank) for rank in range(world_size)]

    def program(rank: int) -> tuple[Tensor, ...]:
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        first, second, third = (torch.zeros(shape, dtype=dtype) for _ in range(3))
        pending = dist.isend(inputs[rank].clone(), right, tag=1)
        later = dist.irecv(second, left, tag=2)
        dist.recv(first, left, tag=1)
        pending.wait()
        other = dist.isend(inputs[rank].clone(), right, tag=2)
        later.wait()
        other.wait()
        ops = [dist.P2POp(dist.irecv, third, left), dist.P2POp(dist.isend, inputs[rank].clone(), right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return first, second, third

    for rank, received in enumerate(on_all_ranks(world_size, program)):
        for tensor in received:
            assert_equal(tensor, inputs[(rank - 1) % world_size])


def test_recv_from_any_names_the_sender_and_messages_keep_their_order() -> None:
    def program(rank: int) -> Any:
        if rank:
            for number in range(2):
                dist.send(torch.tensor([10 * rank + number]), 0)
            return None
        buffer, seen = torch.zeros(1, dtype=torch.int64), []
        for _ in range(4):
            seen.append((dist.recv(buffer), int(buffer)))
        return seen

    seen = on_all_ranks(3, program)[0]
    assert [value for source, value in seen if source == 1] == [10, 11]
    assert [value for source, value in seen if source == 2] == [20, 21]


@given(st.integers(2, 6), st.data())
@PROFILE
def test_subgroups_reduce_among_their_members_only(world_size: int, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=world_size)))
    others = [rank for rank in range(world_size) if rank not in members]

    def program(rank: int) -> tuple[Tensor, Tensor]:
        groups = [dist.new_group(ranks) for ranks in (members, others) if ranks]
        own = groups[0] if rank in members else groups[1]
        total, first = torch.tensor([2.0**rank]), torch.tensor([float(rank)])
        dist.all_reduce(total, group=own)
        dist.broadcast(first, dist.get_global_rank(own, 0), group=own)
        return total, first

    for rank, (total, first) in enumerate(on_all_ranks(world_size, program)):
        own = members if rank in members else others
        assert total.item() == sum(2.0**member for member in own)
        assert first.item() == own[0]


@given(st.integers(1, 4), st.permutations(range(4)), reductions())
@PROFILE
def test_waits_in_any_order(world_size: int, order: list[int], reduction: tuple[str, torch.dtype]) -> None:
    op, dtype = reduction
    inputs = [[draw_tensor((number + 1,), dtype, 10 * rank + number) for number in range(4)] for rank in range(world_size)]

    def program(rank: int) -> list[Tensor]:
        tensors = [x.clone() for x in inputs[rank]]
        works = [dist.all_reduce(x, reduce_op(op), async_op=True) for x in tensors]
        for index in order if rank % 2 else order[::-1]:
            works[index].wait()
        return tensors

    for results in on_all_ranks(world_size, program):
        for number, result in enumerate(results):
            assert_equal(result, expected_reduction([own[number] for own in inputs], op))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16, 33, 64])
def test_world_sizes(world_size: int) -> None:
    def program(rank: int) -> tuple[int, float]:
        x = torch.tensor([float(rank + 1)])
        dist.all_reduce(x)
        dist.barrier()
        return dist.get_world_size(), x.item()

    assert on_all_ranks(world_size, program) == [(world_size, world_size * (world_size + 1) / 2)] * world_size


def test_strided_tensors_give_right_values_and_are_recorded_as_a_hazard() -> None:
    base = torch.arange(6.0).reshape(2, 3)

    def program(rank: int) -> tuple[Tensor, Tensor]:
        x = (base + rank).t()
        dist.all_reduce(x)
        output = torch.zeros(4, 3).t()[:, ::2]
        dist.all_gather_into_tensor(output, torch.tensor([1.0, 2.0, 3.0]) + rank)
        return x, output

    simulation = simulate(lambda: program(dist.get_rank()), 2)
    for x, output in simulation.results:
        assert_equal(x, (2 * base + 1).t())
        assert_equal(output, torch.tensor([[1.0, 2.0], [3.0, 2.0], [3.0, 4.0]]))
    assert [record.hazards for record in simulation.ledger] == [("non-contiguous",)] * 4


def test_results_follow_the_reduction_order() -> None:
    values = (1.0, 1e8, -1e8, 1.0)

    def program(rank: int) -> float:
        x = torch.tensor([values[rank]])
        dist.all_reduce(x)
        return x.item()

    f = [torch.tensor(value) for value in values]
    expected = {
        "rank": ((f[0] + f[1]) + f[2]) + f[3],
        "reversed": ((f[3] + f[2]) + f[1]) + f[0],
        "tree": (f[0] + f[1]) + (f[2] + f[3]),
    }
    assert len({value.item() for value in expected.values()}) > 1
    for order, value in expected.items():
        assert on_all_ranks(4, program, reduction_order=order) == [value.item()] * 4


@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(deadline=None, max_examples=25)
def test_schedules_do_not_change_results_or_records(schedule: int, world_size: int) -> None:
    def program(rank: int) -> list[Tensor]:
        group = dist.new_group([0, world_size - 1])
        x = torch.rand(3, dtype=torch.float64) * (rank + 1)
        work = dist.all_reduce(x, async_op=True)
        y = torch.rand(2)
        if rank in (0, world_size - 1):
            dist.all_reduce(y, group=group)
        work.wait()
        gathered = torch.zeros(world_size * 3, dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, x)
        return [x, y, gathered]

    plain, other = (simulate(lambda: program(dist.get_rank()), world_size, schedule=number) for number in (None, schedule))
    for ours, theirs in zip(plain.results, other.results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    for rank in range(world_size):
        assert plain.ledger.rank(rank).records == other.ledger.rank(rank).records


def test_a_schedule_really_changes_the_order_of_ranks() -> None:
    def order(schedule: int | None) -> tuple[int, ...]:
        simulation = simulate(dist.barrier, 5, schedule=schedule)
        return tuple(record.rank for record in simulation.ledger)

    assert order(None) == (0, 1, 2, 3, 4)
    assert len({order(seed) for seed in range(10)}) > 1
