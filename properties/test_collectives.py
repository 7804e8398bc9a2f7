"""Algebra of the collectives: every forward/backward pair is adjoint, and identities between collectives hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tpverify.simulator.collectives import REDUCTION_ORDERS, reduce_tensors
from tpverify.simulator.world import simulate
from tpverify.subjects import mappings

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
PROFILE = settings(deadline=None, max_examples=25)


@dataclass(frozen=True)
class Pair:
    """A function whose backward is its adjoint.

    Attributes:
        forward: applied on every rank to its own tensor, whose first extent divides by the world size.
        replicated_input, replicated_output: the tensor is one logical tensor held by every rank, so that the inner
            product counts it once; otherwise every rank holds an own part of a larger vector.
    """

    forward: Callable[[Tensor], Tensor]
    replicated_input: bool = False
    replicated_output: bool = False


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def even(x: Tensor) -> list[int]:
    return [len(x)] * world().size()


def parts(x: Tensor) -> list[int]:
    return mappings.split_sizes(len(x), world().size())


PAIRS = {
    "copy_to_region": Pair(lambda x: mappings.copy_to_region(x, world()), replicated_input=True),
    "reduce_from_region": Pair(lambda x: mappings.reduce_from_region(x, world()), replicated_output=True),
    "gather_from_region": Pair(lambda x: mappings.gather_from_region(x, 0, even(x), world()), replicated_output=True),
    "scatter_to_region": Pair(lambda x: mappings.scatter_to_region(x, 0, parts(x), world()), replicated_input=True),
    "gather_sequence": Pair(lambda x: mappings.gather_sequence(x, world())),
    "reduce_scatter_sequence": Pair(lambda x: mappings.reduce_scatter_sequence(x, world())),
    "nn.all_reduce": Pair(lambda x: dist_nn.all_reduce(x.clone())),
    "nn.all_gather": Pair(lambda x: torch.cat(dist_nn.all_gather(x))),
    "nn.all_to_all_single": Pair(lambda x: dist_nn.all_to_all_single(torch.empty_like(x), x)),
    "nn.reduce_scatter": Pair(
        lambda x: dist_nn.reduce_scatter(torch.empty_like(x[: len(x) // world().size()]), list(x.chunk(world().size())))
    ),
    "nn.broadcast": Pair(lambda x: dist_nn.broadcast(x.clone(), world().size() - 1)),
    "funcol.all_gather": Pair(lambda x: funcol.all_gather_tensor_autograd(x, 0, world())),
    "funcol.reduce_scatter": Pair(lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, world())),
    "funcol.all_to_all": Pair(
        lambda x: funcol.all_to_all_single_autograd(x, even(x[: len(x) // world().size()]), even(x[: len(x) // world().size()]), world())
    ),
    "funcol.all_reduce": Pair(lambda x: funcol.all_reduce(x, "sum", world())),
}


def inner(tensors: list[tuple[Tensor, Tensor]], replicated: bool) -> Tensor:
    products = [(a * b).sum() for a, b in tensors]
    return products[0] if replicated else torch.stack(products).sum()


@pytest.mark.parametrize("name", PAIRS)
@given(st.integers(1, 4), SHAPES, st.integers(0, 2**31))
@settings(deadline=None, max_examples=12)
def test_forward_and_backward_are_adjoint(name: str, world_size: int, shape: tuple[int, ...], seed: int) -> None:
    """<f(x), y> = <x, f*(y)> over all ranks; integers make both sides exact."""
    pair = PAIRS[name]

    def draw(size: tuple[int, ...], rank: int, replicated: bool) -> Tensor:
        generator = torch.Generator().manual_seed(seed + (0 if replicated else rank))
        return torch.randint(-9, 10, size, generator=generator).double()

    def program() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rank = dist.get_rank()
        x = draw((shape[0] * world_size, *shape[1:]), rank, pair.replicated_input).requires_grad_()
        output = pair.forward(x)
        y = draw(tuple(output.shape), rank + 100, False) if not pair.replicated_output else draw(tuple(output.shape), 0, True)
        (gradient,) = torch.autograd.grad(output, x, y)
        return output.detach(), y, x.detach(), gradient

    results = simulate(program, world_size).results
    left = inner([(output, y) for output, y, _, _ in results], pair.replicated_output)
    right = inner([(x, gradient) for _, _, x, gradient in results], pair.replicated_input)
    assert left == right
    if pair.replicated_output:
        assert all(torch.equal(output, results[0][0]) for output, *_ in results)
    if pair.replicated_input:
        assert all(torch.equal(gradient, results[0][3]) for *_, gradient in results)


def test_a_wrong_pair_is_not_adjoint() -> None:
    """The plain all_reduce of a row-parallel layer, taken for its own adjoint where the output is replicated."""

    def program() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = torch.tensor([1.0 + dist.get_rank()], requires_grad=True)
        output = dist_nn.all_reduce(x.clone())
        (gradient,) = torch.autograd.grad(output, x, torch.ones(1))
        return output.detach(), torch.ones(1), x.detach(), gradient

    results = simulate(program, 2).results
    assert inner([(output, y) for output, y, _, _ in results], True) == 3.0
    assert inner([(x, gradient) for _, _, x, gradient in results], False) == 6.0


@given(st.integers(1, 5), SHAPES, st.integers(0, 2**31))
@PROFILE
def test_identities_between_collectives(world_size: int, shape: tuple[int, ...], seed: int) -> None:
    def program() -> None:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(seed + rank)
        x = torch.randn((shape[0] * world_size, *shape[1:]), generator=generator, dtype=torch.float64)
        total, piece, joined = x.clone(), torch.empty(shape, dtype=torch.float64), torch.empty_like(x)
        dist.all_reduce(total)
        dist.reduce_scatter_tensor(piece, x)
        dist.all_gather_into_tensor(joined, piece)
        assert torch.equal(joined, total)  # all_reduce = all_gather after reduce_scatter
        reduced = x.clone()
        dist.reduce(reduced, 0)
        dist.broadcast(reduced, 0)
        assert torch.equal(reduced, total)  # all_reduce = broadcast after reduce
        once, twice = torch.empty_like(x), torch.empty_like(x)
        dist.all_to_all_single(once, x)
        dist.all_to_all_single(twice, once)
        assert torch.equal(twice, x)  # all_to_all is its own inverse
        back, gathered = torch.empty_like(piece), [torch.empty_like(piece) for _ in range(world_size)] if rank == 0 else None
        dist.gather(piece, gathered, dst=0)
        dist.scatter(back, gathered, src=0)
        assert torch.equal(back, piece)  # scatter undoes gather
        mean = x.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert torch.equal(mean, total / world_size)

    simulate(program, world_size)


@given(st.integers(1, 9), st.sampled_from(REDUCTION_ORDERS), st.sampled_from(("SUM", "PRODUCT", "MIN", "MAX")), st.integers(0, 2**31))
@PROFILE
def test_every_order_is_within_rounding(count: int, order: str, op: str, seed: int) -> None:
    tensors = list(torch.randn(count, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    result, plain = reduce_tensors(tensors, op, order), reduce_tensors(tensors, op)
    magnitude = torch.stack(tensors).abs().sum(0) if op == "SUM" else plain.abs()
    assert bool(((result - plain).abs() <= 2 * count * 2**-53 * magnitude).all())
    assert all(result.data_ptr() != tensor.data_ptr() for tensor in tensors)
