"""How bugs are planted: layers of a built-in subject are exchanged for wrong ones, and what verifying that came to is asserted on."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy
from torch import Tensor

import tpverify as tpv
from tpverify.case import Case
from tpverify.mutants.mutant import planted as plant
from tpverify.verification import read_case

__all__ = ["assert_minimal", "broken_checks", "built_in_configs", "case_of", "clone_reduce", "plant", "the", "verified"]


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
