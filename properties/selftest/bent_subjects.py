"""A right row-parallel subject of a few lines, and wrong or unusual versions of it, as a user might write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import tpverify as tpv
from tpverify.result import Result
from tpverify.subjects.mappings import reduce_from_region


@dataclass(frozen=True)
class Sizes:
    """Elements; the input is [seq, features]."""

    seq: int = 1
    features: int = 1
    out: int = 1


SIZES = Sizes(seq=3, features=4, out=2)


class Reference(nn.Module):
    """x W."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.out, c.features))

    def forward(self, x: Tensor) -> Any:
        """[seq, features] -> [seq, out]."""
        return F.linear(x, self.weight)


class Parallel(nn.Module):
    """x W with W cut along its features and one reduction."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.group = tpv.tp_group()
        self.weight = nn.Parameter(torch.empty(c.out, c.features // dist.get_world_size(self.group)))

    def forward(self, x: Tensor) -> Any:
        """[seq, features / world_size] -> [seq, out]."""
        return reduce_from_region(F.linear(x, self.weight), self.group)


def sizes(world_size: int) -> st.SearchStrategy[Sizes]:
    """Features are a multiple of the world size."""
    per_rank = st.integers(1, 3)
    return st.builds(Sizes, seq=st.integers(1, 3), features=per_rank.map(lambda part: part * world_size), out=st.integers(1, 3))


right = tpv.Subject(
    name="right",
    reference=Reference,
    parallel=Parallel,
    configs=sizes,
    inputs=lambda c: {"x": tpv.Input((c.seq, c.features), placement=tpv.Shard(1))},
    placements={"weight": tpv.Shard(1)},
    exact=True,
    subgroups=True,
)


def bent(**changes: Any) -> tpv.Subject:
    """The right subject with some of its attributes changed."""
    return dataclasses.replace(right, **{"name": "bent", **changes})


def with_output(change: Callable[[Any], Any], *, parallel: Callable[[Any], Any] | None = None) -> tpv.Subject:
    """The right subject with its output changed: on both sides alike, unless ``parallel`` is given."""
    return bent(reference=_Changed.of(Reference, change), parallel=_Changed.of(Parallel, parallel or change))


class _Changed:
    @staticmethod
    def of(base: type[nn.Module], change: Callable[[Any], Any]) -> type[nn.Module]:
        """``base`` with its output changed."""

        def forward(self: nn.Module, x: Tensor) -> Any:
            return change(base.forward(self, x))

        return type(base.__name__, (base,), {"forward": forward})


def parallel(forward: Callable[[Parallel, Tensor], Any], **changes: Any) -> tpv.Subject:
    """The right subject with another forward of the parallel module."""
    return bent(parallel=type("Parallel", (Parallel,), {"forward": forward}), **changes)


def raises_on_rank_1(module: Parallel, x: Tensor) -> Tensor:
    """Only one rank fails; the other waits for it."""
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    return reduce_from_region(F.linear(x, module.weight), module.group)


def loops_on_rank_1(module: Parallel, x: Tensor) -> Tensor:
    """Only one rank never comes back."""
    while dist.get_rank() == 1:
        pass
    return reduce_from_region(F.linear(x, module.weight), module.group)


class Single(nn.Module):
    """x W, hard-coded to float32."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.group = tpv.tp_group()
        self.weight = nn.Parameter(torch.empty(c.out, c.features // dist.get_world_size(self.group), dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """[seq, features / world_size] -> [seq, out]."""
        return reduce_from_region(F.linear(x, self.weight), self.group)


class SingleWithCast(Single):
    """The same, for inputs of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """[seq, features / world_size] -> [seq, out]."""
        return super().forward(x.float())


class Tied(nn.Module):
    """Two layers with one weight; replicated."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.first = nn.Linear(c.features, c.features, bias=False)
        self.second = nn.Linear(c.features, c.features, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """[seq, features] -> the same."""
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


class Untied(Tied):
    """Two layers with a weight each."""

    def __init__(self, c: Sizes) -> None:
        super().__init__(c)
        self.second.weight = nn.Parameter(torch.empty(c.features, c.features))


def replicated(reference: type[nn.Module], parallel: type[nn.Module]) -> tpv.Subject:
    """A subject in which every rank does everything."""
    return bent(
        reference=reference,
        parallel=parallel,
        inputs=lambda c: {"x": tpv.Input((c.seq, c.features))},
        placements={"*": tpv.Replicate()},
        exact=False,
        subgroups=False,
    )


def verified(subject: tpv.Subject, **options: Any) -> Result:
    """A few cases on two ranks."""
    return tpv.verify(subject, **{"max_examples": 10, "world_sizes": (2,), **options})


def broken(subject: tpv.Subject, config: Sizes = SIZES, **options: Any) -> list[tpv.Violation]:
    """The violations of one ordinary case on two ranks, not shrunk."""
    return tpv.check_case(subject, tpv.Case(subject.name, config, 2, **options))


def found(violations: Sequence[tpv.Violation]) -> list[tuple[str, str]]:
    """Check and tensor of every violation."""
    return [(violation.check, violation.tensor) for violation in violations]


def unreduced(module: Parallel, x: Tensor) -> Tensor:
    """The reduction is forgotten."""
    return F.linear(x, module.weight)


wrong = parallel(unreduced)
