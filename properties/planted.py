"""How bugs are planted: layers of a built-in subject are exchanged for wrong ones, and what verifying that came to is asserted on."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

import tpverify as tpv
from tpverify.case import Case
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.mappings import copy_to_region, gather_from_region, reduce_from_region, reduce_scatter_sequence, scatter_to_region
from tpverify.subjects.parameters import with_bias
from tpverify.verification import read_case


class OpenColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear in steps that a planted bug can replace; under sequence parallelism it is the built-in one."""

    def spread(self, x: Tensor) -> Tensor:
        """f."""
        return copy_to_region(x, self.group)

    def join(self, output: Tensor) -> Tensor:
        """All output features."""
        return gather_from_region(output, -1, self.sizes, self.group)

    def forward(self, x: Tensor) -> Any:
        """[..., in_features] -> [..., out_features / world_size]."""
        if self.sequence_parallel:
            return super().forward(x)
        weight, bias = self.local_parameters()
        output = with_bias(F.linear(self.spread(x), weight), None if self.skip_bias_add else bias)
        output = self.join(output) if self.gather_output else output
        return (output, bias) if self.skip_bias_add else output


class OpenRowLinear(RowParallelLinear):
    """RowParallelLinear in steps that a planted bug can replace."""

    def multiply(self, x: Tensor) -> Tensor:
        """This rank's partial result."""
        return F.linear(x, self.weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """g."""
        return reduce_from_region(partial, self.group)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """g along the sequence."""
        return reduce_scatter_sequence(partial, self.group)

    def add_bias(self, output: Tensor) -> Tensor:
        """The whole result."""
        return with_bias(output, self.bias)

    def forward(self, x: Tensor) -> Any:
        """[..., in_features / world_size] -> [..., out_features]."""
        x = x if self.input_is_parallel else scatter_to_region(x, -1, self.sizes, self.group)
        partial = self.multiply(x)
        output = self.reduce_scatter(partial) if self.sequence_parallel else self.reduce(partial)
        return (output, self.bias) if self.skip_bias_add else self.add_bias(output)


def plant(base: tpv.Subject, name: str, *layers: type[nn.Module], **changes: Any) -> tpv.Subject:
    """``base`` with each of its layers that a wrong class derives from turned into that class.

    Args:
        name: name of the planted subject.
        layers: wrong classes; they must not need other attributes than the built-in class they derive from.
        changes: other fields of the subject that differ.
    """

    def parallel(config: Any) -> nn.Module:
        module = base.parallel(config)
        for wrong in layers:
            right = next(parent for parent in wrong.__mro__ if parent.__module__.startswith(("tpverify.", "torch.")))
            for layer in module.modules():
                if type(layer) is right:
                    layer.__class__ = wrong
        return module

    return replace(base, **{"name": name, "parallel": parallel, **changes})


def built_in_configs(subject: tpv.Subject, world_size: int) -> SearchStrategy[Any]:
    """The configs of a built-in subject, to be narrowed."""
    assert callable(subject.configs)
    return subject.configs(world_size)


@functools.cache
def verified(subject: tpv.Subject, max_examples: int = 100) -> tpv.Result:
    """What verifying the subject came to, once in a session."""
    return tpv.verify(subject, max_examples=max_examples, seed=0)


def broken_checks(result: tpv.Result) -> set[str]:
    """Ids of the checks that do not hold."""
    return {violation.check for violation in result.violations}


def the(result: tpv.Result, check: str, tensor: str | None = None) -> tpv.Violation:
    """The violation of a check, on a tensor if one is named; fails with what there is instead."""
    found = [v for v in result.violations if v.check == check and tensor in (None, v.tensor)]
    assert found, f"no violation of {check} on {tensor or 'any tensor'} but {[(v.check, v.tensor) for v in result.violations]}"
    return found[0]


def case_of(violation: tpv.Violation) -> Case:
    """The violation's case, read back from its text."""
    return read_case(violation.case)[1]


def assert_minimal(violation: tpv.Violation, *, world_size: int = 2, but: Collection[str] = (), **config: Any) -> None:
    """The case is as simple as one can be that shows the bug: one TP group, and every config field at its simplest.

    Args:
        but: fields of the case that need not have their default.
        config: the config fields that the bug needs, or whose smallest value depends on ``world_size``.
    """
    case = case_of(violation)
    assert case.world_size == violation.world_size == world_size
    plain = {"seed": 0, "values": "normal", "layout": "contiguous", "groups": "world"}
    assert {key: getattr(case, key) for key in plain if key not in but} == {key: value for key, value in plain.items() if key not in but}
    assert {key: getattr(case.config, key) for key in config} == config


def clone_reduce(x: Tensor, group: torch.distributed.ProcessGroup, **options: Any) -> Tensor:
    """The sum over ranks in a fresh tensor, without autograd."""
    output = x.detach().clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(output, group=group, **options)
    return output
