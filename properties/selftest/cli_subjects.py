"""Subjects that the tests of the command line and of the plugin name as module:attribute; all but one are wrong on purpose."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st

import tpverify as tpv
from tpverify.subjects.builtin import BUILTIN
from tpverify.subjects.linear_subjects import RowParallelLinearConfig


class UnreducedLinear(torch.nn.Module):
    """A row-parallel linear layer whose author forgot to add up the ranks' parts."""

    def __init__(self, config: RowParallelLinearConfig) -> None:
        super().__init__()
        part = config.in_features // dist.get_world_size()
        self.weight = torch.nn.Parameter(torch.empty(config.out_features, part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the product, where the sum is due."""
        return F.linear(x, self.weight)


def plain_configs(world_size: int) -> st.SearchStrategy[RowParallelLinearConfig]:
    """No bias, no options, sizes that divide."""
    return st.builds(
        RowParallelLinearConfig,
        in_features=st.integers(1, 3).map(lambda part: part * world_size),
        out_features=st.integers(1, 3),
        bias=st.just(False),
    )


def contradiction(config: Any) -> dict[str, tpv.Input]:
    """Inputs that contradict themselves."""
    return {"x": tpv.Input((1,), kind="integers", low=1, high=1)}


unreduced = dataclasses.replace(
    BUILTIN["row_parallel_linear"], name="cli_subjects:unreduced", parallel=UnreducedLinear, configs=plain_configs, subgroups=False
)
named = tpv.Subject(
    name="cli_subjects:named",
    reference=lambda c: torch.nn.Linear(c.n, c.m),
    parallel=lambda c: torch.nn.Linear(c.n, c.m),
    configs=tpv.configs(n=st.integers(1, 3), m=st.integers(1, 3)),
    inputs=lambda c: {"x": tpv.Input((2, c.n))},
    placements={"*": tpv.Replicate()},
)
contradicting = dataclasses.replace(unreduced, name="cli_subjects:contradicting", inputs=contradiction)
not_a_subject = 1
