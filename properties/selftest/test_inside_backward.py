"""Which submodule a wrong gradient is blamed on: the one that was given the right one, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import tpverify as tpv
from tpverify.mutants.mutant import planted
from tpverify.sharding import Replicate, Shard
from tpverify.subjects.linear import ColumnParallelLinear
from tpverify.subjects.mappings import copy_to_region
from tpverify.verification import builtin_subjects

FAR = "hands on only a summand"
WRONG = "hands on a wrong gradient"


class Open(ColumnParallelLinear):
    """A column-parallel layer without f, so that its input's gradient is a summand."""

    def forward(self, x: Tensor) -> Any:
        if self.sequence_parallel or self.gather_output or self.skip_bias_add:
            return super().forward(x)
        return nn.functional.linear(x, *self.local_parameters())


class Twice(Open):
    """One with f too often."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(copy_to_region(copy_to_region(x, self.group), self.group))


class Branches(nn.Module):
    """Two layers fed by one tensor, behind another layer."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4, bias=False)
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.scale(x)
        return self.left(x), self.right(x)


def plain(config: Any) -> nn.Linear:
    """4 features -> those of the config."""
    return nn.Linear(4, config.features, bias=False)


def column(config: Any, layer: type[ColumnParallelLinear] = ColumnParallelLinear) -> ColumnParallelLinear:
    """The same, each rank its own features."""
    return layer(4, config.features, bias=False, group=tpv.tp_group())


def branches(right: type[ColumnParallelLinear]) -> tpv.Subject:
    """Both layers are column parallel, the second a given one."""
    return tpv.Subject(
        name="branches",
        reference=lambda config: Branches(plain(config), plain(config)),
        parallel=lambda config: Branches(column(config), column(config, right)),
        configs=tpv.configs(features=tpv.per_rank(2, 2)),
        inputs=lambda config: {"x": tpv.Input((3, 4))},
        placements={"scale.weight": Replicate(), "*": Shard(0)},
        outputs=(Shard(-1), Shard(-1)),
    )


def named(subject: tpv.Subject) -> dict[str, str]:
    """The modules that are blamed, and the first line of why."""
    result = tpv.verify(subject, max_examples=20, seed=0, world_sizes=(2,), checks=("input-gradient", "parameter-gradient"))
    assert not result.passed
    return {v.tensor: v.message.splitlines()[0] for v in result.violations if "module" in v.message.splitlines()[0]}


@pytest.mark.parametrize(("wrong", "text"), [(Open, FAR), (Twice, WRONG)])
def test_of_two_branches_the_wrong_one_is_blamed(wrong: type[ColumnParallelLinear], text: str) -> None:
    found = named(branches(wrong))
    assert list(found) == ["right"]
    assert text in found["right"]


class Pair(nn.Module):
    """Two layers side by side."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class SharedPair(Pair):
    """Two layers behind one f, as the three projections of attention often are."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(copy_to_region(x, tpv.tp_group()))


class Lossy(nn.Linear):
    """A layer whose backward loses most of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * 0.3 + (output * 0.7).detach()


class Chain(nn.Module):
    """A layer and a pair behind it."""

    def __init__(self, first: nn.Module, pair: Pair) -> None:
        super().__init__()
        self.first, self.pair = first, pair

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = self.pair(self.first(x))
        return output


def test_a_module_that_hands_on_summands_is_right_where_what_surrounds_it_sums_them() -> None:
    subject = tpv.Subject(
        name="shared_f",
        reference=lambda config: Chain(nn.Linear(4, 4, bias=False), Pair(plain(config), plain(config))),
        parallel=lambda config: Chain(Lossy(4, 4, bias=False), SharedPair(column(config, Open), column(config, Open))),
        configs=tpv.configs(features=tpv.per_rank(2, 2)),
        inputs=lambda config: {"x": tpv.Input((3, 4))},
        placements={"pair.*": Shard(0), "first.weight": Replicate()},
        outputs=(Shard(-1), Shard(-1)),
    )
    found = named(subject)
    assert list(found) == ["first"]
    assert WRONG in found["first"]


@pytest.mark.parametrize(("wrong", "text", "pattern"), [(Open, FAR, "a missing all_reduce"), (Twice, WRONG, "2 times the expected value")])
def test_a_layer_deep_inside_a_block_is_blamed_with_its_pattern(wrong: type[ColumnParallelLinear], text: str, pattern: str) -> None:
    subject = planted(builtin_subjects()["transformer_block"], "planted", wrong)
    result = tpv.verify(subject, max_examples=30, seed=0, checks=("input-gradient",))
    blamed = {v.tensor: v for v in result.violations if v.tensor.startswith(("mlp", "attention"))}
    assert list(blamed) == ["mlp.fc1"]
    assert text in blamed["mlp.fc1"].message and pattern in blamed["mlp.fc1"].diagnosis
