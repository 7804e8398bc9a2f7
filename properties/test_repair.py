"""Repairs: a single change of collectives, operations or circumstances that mends a failed case names the fault; chance does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

import tpverify as tpv
from tpverify.case import Case
from tpverify.checks.catalogue import CHECKS
from tpverify.current_group import tp_group
from tpverify.lookup import read_case
from tpverify.mutants.mutant import planted
from tpverify.repair.search import circumstances_of, repairs_of
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import RowParallelLinearConfig, row_parallel_linear
from tpverify.subjects.mappings import copy_to_region, reduce_from_region

TIMEOUT = 30.0
Reduce = Callable[[Tensor], Tensor]
CASE = Case("row", RowParallelLinearConfig(seq=3, batch=2, in_features=4, out_features=4, bias=False), world_size=4)


class Normalised(nn.Module):
    """A sharded vector per token, normalised over all of its features."""

    def __init__(self, statistic: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.statistic = statistic

    def forward(self, x: Tensor) -> Tensor:
        """[seq, batch, hidden] -> the same."""
        return x * self.weight * self.statistic(x)


def summed(square: Tensor) -> Tensor:
    """The sum over ranks, whose gradient is summed as well: each rank goes on with its own part."""
    return copy_to_region(reduce_from_region(square, tp_group()), tp_group())


def normalised(statistic: Callable[[Tensor], Tensor]) -> tpv.Subject:
    """A subject that gets the statistic in its own way; hidden is 8 in all."""
    return tpv.Subject(
        name="normalised",
        reference=lambda c: Normalised(lambda x: (x * x).sum(-1, keepdim=True).rsqrt()),
        parallel=lambda c: Normalised(statistic),
        configs=st.just(CASE.config),
        inputs=lambda c: {"x": tpv.Input((3, 2, 8), placement=tpv.Shard(2))},
        placements={"weight": tpv.Placement(tpv.Replicate(), tpv.Partial())},
        outputs=tpv.Shard(2),
    )


def right_statistic(x: Tensor) -> Tensor:
    """Over all ranks' features."""
    return summed((x * x).sum(-1, keepdim=True)).rsqrt()


def own_statistic(x: Tensor) -> Tensor:
    """Over this rank's features."""
    return (x * x).sum(-1, keepdim=True).rsqrt()


def own_norm(x: Tensor) -> Tensor:
    """Over this rank's features, by another function."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return 1.0 / norm


def detached_statistic(x: Tensor) -> Tensor:
    """Right, but no gradient goes through it."""
    with torch.no_grad():
        return right_statistic(x)


def detached_input(x: Tensor) -> Tensor:
    """Likewise."""
    return right_statistic(x.detach())


def narrow_statistic(x: Tensor) -> Tensor:
    """Right, but in another precision."""
    return summed((x.bfloat16() ** 2).to(x.dtype).sum(-1, keepdim=True)).rsqrt()


def narrow_sum(x: Tensor) -> Tensor:
    """Right, but summed in another precision."""
    return summed((x * x).sum(dim=-1, keepdim=True, dtype=torch.bfloat16).to(x.dtype)).rsqrt()


def largest_statistic(x: Tensor) -> Tensor:
    """The largest of the ranks' sums in place of their sum."""
    square = (x * x).sum(-1, keepdim=True).detach()
    dist.all_reduce(square, dist.ReduceOp.MAX, group=tp_group())
    return square.rsqrt()


STATISTICS: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {
    own_statistic: ("sum", "a local statistic"),
    own_norm: ("linalg_vector_norm", "a local statistic"),
    detached_statistic: ("without no_grad", "a detached branch"),
    detached_input: ("without detach", "a detached branch"),
    narrow_statistic: ("without the cast to bfloat16", "its rounding"),
    narrow_sum: ("without dtype=bfloat16 of sum", "its rounding"),
    largest_statistic: ("with all_reduce(SUM) in place of all_reduce(MAX)", "a wrong reduce op"),
}


def repaired(subject: tpv.Subject, case: Case = CASE, **options: object) -> str:
    """All that is said of a case, in one text."""
    return "\n".join(repairs_of(subject, case, CHECKS, TIMEOUT, **options).values())  # type: ignore[arg-type]


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.__name__)
def test_what_an_operation_does_wrong_is_named(statistic: Callable[[Tensor], Tensor]) -> None:
    change, meaning = STATISTICS[statistic]
    said = repaired(normalised(statistic), dataclasses.replace(CASE, world_size=2))
    assert change in said and f"{meaning} fits this" in said
    assert (
        f"test_repair.py:{statistic.__code__.co_firstlineno + 2}" in said
        or f"test_repair.py:{statistic.__code__.co_firstlineno + 3}" in said
    )


def test_nothing_is_said_of_correct_code() -> None:
    assert repairs_of(normalised(right_statistic), CASE, CHECKS, TIMEOUT) == {}
    assert repairs_of(row_parallel_linear, CASE, CHECKS, TIMEOUT) == {}


class Reduced(RowParallelLinear):
    """Sums in some other way."""

    def reduce(self, partial: Tensor) -> Tensor:
        """Wrong."""
        partial = partial.contiguous()
        self.wrongly(partial, self.group)
        return partial

    def wrongly(self, partial: Tensor, group: dist.ProcessGroup) -> None:
        """What is done in place of a sum over the ranks."""


class Neighbours(Reduced):
    """Sums over pairs of neighbouring ranks."""

    def wrongly(self, partial: Tensor, group: dist.ProcessGroup) -> None:
        """Two by two."""
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        dist.all_reduce(partial, group=pairs[dist.get_rank() // 2])


class Twice(Reduced):
    """Sums the sum."""

    def wrongly(self, partial: Tensor, group: dist.ProcessGroup) -> None:
        """Once more than needed, of another tensor."""
        dist.all_reduce(partial, group=group)
        with torch.no_grad():
            more = partial.sin()
            dist.all_reduce(more, group=group)
            partial.add_(more - partial.sin())


class Mean(Reduced):
    """The mean."""

    def wrongly(self, partial: Tensor, group: dist.ProcessGroup) -> None:
        """AVG for SUM."""
        dist.all_reduce(partial, dist.ReduceOp.AVG, group=group)


class Unsummed(nn.Module):
    """A gate whose second factor is a product over a cut dimension, with a bias; wrong inside of a function that is not linear."""

    def __init__(self, whole: int, cut: int, f: Reduce, g: Reduce) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3, cut)), nn.Parameter(torch.empty(3))
        self.up = nn.Parameter(torch.empty(cut, whole))
        self.f, self.g = f, g

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, whole] -> [tokens, 3]."""
        inner = self.f(x.sin()) @ self.up.t()
        return (self.g(nn.functional.linear(inner, self.weight)) + self.bias).tanh()


def unsummed(f: Reduce, g: Reduce) -> tpv.Subject:
    """A subject with or without its reductions."""
    return tpv.Subject(
        name="unsummed",
        reference=lambda c: Unsummed(4, 8, lambda x: x, lambda x: x),
        parallel=lambda c: Unsummed(4, 8 // dist.get_world_size(), f, g),
        configs=st.just(CASE.config),
        inputs=lambda c: {"x": tpv.Input((3, 4))},
        placements={"weight": tpv.Shard(1), "bias": tpv.Replicate(), "up": tpv.Shard(0)},
    )


def test_a_missing_reduction_inside_is_named() -> None:
    def f(x: Tensor) -> Tensor:
        return copy_to_region(x, tp_group())

    def g(x: Tensor) -> Tensor:
        return reduce_from_region(x, tp_group())

    def nothing(x: Tensor) -> Tensor:
        return x

    assert repaired(unsummed(f, g)) == ""
    forward, backward = repaired(unsummed(f, nothing)), repaired(unsummed(nothing, g))
    assert "right if linear at " in forward and "is summed over all ranks: a missing all_reduce fits this" in forward
    assert "right if the gradient of what matmul at " in backward and "a missing all_reduce in backward fits this" in backward


COLLECTIVES: dict[type[RowParallelLinear], str] = {
    Neighbours: "goes over the whole TP group: a wrong group fits this",
    Twice: "right without all_reduce(SUM)",
    Mean: "with all_reduce(SUM) in place of all_reduce(AVG)",
}


@pytest.mark.parametrize("layer", COLLECTIVES, ids=lambda layer: layer.__name__)
def test_what_a_collective_does_wrong_is_named(layer: type[RowParallelLinear]) -> None:
    assert COLLECTIVES[layer] in repaired(planted(row_parallel_linear, "row", layer))


class Scattered(RowParallelLinear):
    """Scatters from the first rank on the way, where ranks bring different numbers of tensors."""

    def reduce(self, partial: Tensor) -> Tensor:
        """The mean, and a scatter of nothing in particular."""
        own = torch.empty(1)
        parts = [torch.ones(1) for _ in range(self.group.size())] if self.group.rank() == 0 else None
        dist.scatter(own, parts, group=self.group, group_src=0)
        partial = partial.contiguous()
        dist.all_reduce(partial, dist.ReduceOp.AVG, group=self.group)
        return partial * own.item()


def test_ranks_may_bring_different_numbers_of_tensors() -> None:
    assert "AVG" in repaired(planted(row_parallel_linear, "row", Scattered))


class Offset(RowParallelLinear):
    """Adds a number to the result: no repair takes that back."""

    def reduce(self, partial: Tensor) -> Tensor:
        """Off by a hundredth."""
        return super().reduce(partial) + 0.01


def test_nothing_is_said_where_no_repair_fits() -> None:
    assert repairs_of(planted(row_parallel_linear, "row", Offset), CASE, CHECKS, TIMEOUT) == {}


def test_chance_is_found_out_by_another_case() -> None:
    # The larger of two ranks' maxima is their sum where one of them is zero.
    subject = planted(row_parallel_linear, "row", Mean)
    assert repaired(subject)
    harmless = dataclasses.replace(CASE, world_size=1)
    assert repaired(subject, witnesses=(harmless,))  # a case that does not fail says nothing


class OfOneElement(Reduced):
    """Wrong in two ways, of which a single element shows one."""

    def wrongly(self, partial: Tensor, group: dist.ProcessGroup) -> None:
        """The mean, and elements beyond the first are off."""
        dist.all_reduce(partial, dist.ReduceOp.AVG, group=group)
        partial.view(-1)[1:] += 0.01


def test_a_repair_must_mend_the_witnesses() -> None:
    subject = planted(row_parallel_linear, "row", OfOneElement)
    small = dataclasses.replace(CASE, config=RowParallelLinearConfig(in_features=4, bias=False))
    assert "AVG" in repaired(subject, small)
    assert repaired(subject, small, witnesses=(CASE,)) == ""


class Remembers(RowParallelLinear):
    """Keeps the first call's result."""

    def reduce(self, partial: Tensor) -> Tensor:
        """What the first call came to, in every call."""
        total = super().reduce(partial)
        if not hasattr(self, "kept"):
            self.kept = total.detach()
        return total + (self.kept - total).detach()


CIRCUMSTANCES = {
    "calls": ("twice", "called once only"),
    "layout": ("transposed", "all tensors are contiguous"),
    "groups": ("blocks", "one TP group in the world"),
}


class Strides(RowParallelLinear):
    """Reads memory as it comes."""

    def multiply(self, x: Tensor) -> Tensor:
        """Whatever the strides."""
        return super().multiply(x.as_strided(x.shape, torch.empty(x.shape).stride()))


class OfTheWorld(RowParallelLinear):
    """Sums over the world."""

    def reduce(self, partial: Tensor) -> Tensor:
        """Whatever the group."""
        return super().reduce(partial) * (dist.get_world_size() / self.group.size())


@pytest.mark.parametrize(("field", "layer"), [("calls", Remembers), ("layout", Strides), ("groups", OfTheWorld)])
def test_circumstances_are_named(field: str, layer: type[RowParallelLinear]) -> None:
    value, said = CIRCUMSTANCES[field]
    case = dataclasses.replace(CASE, world_size=2, **{field: value})  # type: ignore[arg-type]
    subject = planted(row_parallel_linear, "row", layer)
    assert said in circumstances_of(subject, case, CHECKS, TIMEOUT)
    assert circumstances_of(planted(row_parallel_linear, "row", Mean), case, CHECKS, TIMEOUT) == ""  # wrong in any


class Signed(RowParallelLinear):
    """Wrong where the first element is negative, which depends on the values, not on how often the layer is called."""

    def reduce(self, partial: Tensor) -> Tensor:
        """Off by a hundredth, sometimes."""
        total = super().reduce(partial)
        return total + 0.01 * float(total.reshape(-1)[0] < 0)


def test_circumstances_are_not_blamed_for_values() -> None:
    subject = planted(row_parallel_linear, "row", Signed)
    cases = [dataclasses.replace(CASE, world_size=2, seed=seed, calls="twice") for seed in range(8)]
    once = [dataclasses.replace(case, calls="once") for case in cases]
    shown = [case for case, plain in zip(cases, once, strict=True) if tpv.check_case(subject, case) and not tpv.check_case(subject, plain)]
    assert shown and all(circumstances_of(subject, case, CHECKS, TIMEOUT) == "" for case in shown)


def test_parts_of_different_lengths_are_joined() -> None:
    _, case = read_case("Case('vocab_parallel_cross_entropy', VocabParallelCrossEntropyConfig(seq=3, batch=2, vocab=7), world_size=3)")
    assert "a local statistic" in repaired(
        read_case(repr(case).replace("vocab_parallel_cross_entropy", "tpverify.mutants:own_exponentials_only"))[0], case
    )


def test_a_property_test_says_what_mends_its_smallest_case() -> None:
    test = tpv.property_test(normalised(own_statistic), world_sizes=(2,))
    with pytest.raises(tpv.CheckFailed, match="sees the parts of all ranks: a local statistic fits this"):
        test()


def test_a_report_says_what_mends_it() -> None:
    result = tpv.verify(normalised(own_statistic), world_sizes=(2,), max_examples=5)
    assert any("a local statistic fits this" in violation.diagnosis for violation in result.violations)
