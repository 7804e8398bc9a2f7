"""The styles of ``parallelize_module`` around one layer: a wrong layout is caught, and what is a trap in released DTensor is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpverify as tpv
from tpverify.case import Case
from tpverify.sharding import Replicate, Shard
from tpverify.subjects.dtensor import tp_mesh
from tpverify.subjects.dtensor_linear import LAYOUTS, DTensorLinearConfig, Projection, dtensor_linear
from tpverify.subjects.subject import Subject

KNOWN = torch.__version__.startswith("2.13.")
"""The release in which the discrepancies below were seen."""

CONFIG = DTensorLinearConfig(batch=2, seq=4, in_features=4, out_features=6)


def found(subject: Subject, config: DTensorLinearConfig, world_size: int = 2) -> set[tuple[str, str]]:
    violations = tpv.check_case(subject, Case(subject.name, config, world_size))
    return {(violation.check, violation.tensor) for violation in violations}


@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("wanted", ["replicate", "batch", "sequence", "hidden"])
@pytest.mark.parametrize("prepared", [False, True])
def test_every_layout_on_both_sides(style: str, given: str, wanted: str, prepared: bool) -> None:
    config = replace(CONFIG, style=style, input=given, output=wanted, prepare_input=prepared, prepare_output=prepared)
    assert found(dtensor_linear, config) == set()


def planned(*plans: dict[str, ParallelStyle]) -> Callable[[DTensorLinearConfig], nn.Module]:
    """A module under these plans, one after the other."""

    def parallel(config: DTensorLinearConfig) -> nn.Module:
        module: nn.Module = Projection(config)
        for plan in plans:
            module = parallelize_module(module, tp_mesh(), plan)
        return module

    return parallel


WRONG = {
    "the input is a part of the sequence, and the style takes it for the whole": (
        replace(CONFIG, input="sequence"),
        planned({"linear": ColwiseParallel(output_layouts=Replicate())}),
        ("forward", "output"),
    ),
    "the output is left in parts": (
        replace(CONFIG, style="row"),
        planned({"linear": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))}),
        ("forward", "output"),
    ),
    "the norm is told another dimension": (
        replace(CONFIG, input="sequence", norm="sequence"),
        planned({"norm": SequenceParallel(sequence_dim=0), "linear": ColwiseParallel(output_layouts=Replicate())}),
        ("forward", "output"),
    ),
    "PrepareModuleInput is told another layout": (
        replace(CONFIG, input="sequence"),
        planned(
            {"linear": ColwiseParallel(output_layouts=Replicate())},
            {"": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())},
        ),
        ("forward", "output"),
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_layout_is_caught(mistake: str) -> None:
    config, parallel, expected = WRONG[mistake]
    assert expected in found(replace(dtensor_linear, parallel=parallel), config)


def local_columns(config: DTensorLinearConfig) -> nn.Module:
    """A column-parallel layer of one's own behind PrepareModuleInput, which hands it a plain tensor."""
    module = Projection(replace(config, out_features=config.out_features // dist.get_world_size()))
    layouts = PrepareModuleInput(input_layouts=LAYOUTS[config.input], desired_input_layouts=Replicate(), use_local_output=True)
    return parallelize_module(module, tp_mesh(), layouts)


@pytest.mark.parametrize("given", ["replicate", "sequence"])
def test_what_a_rank_adds_to_the_gradient_is_lost_behind_a_local_input(given: str) -> None:
    """``use_local_output`` of PrepareModuleInput takes a rank's gradient for the whole, as ``to_local()`` does, and cannot be told."""
    subject = replace(dtensor_linear, parallel=local_columns, placements={"*": Shard(0)})
    violations = found(subject, replace(CONFIG, input=given, output="hidden"))
    assert ("input-gradient", "x.grad") in violations and not any(check == "forward" for check, _ in violations)


@pytest.mark.parametrize(
    "config",
    [
        DTensorLinearConfig(style="row", local_output=False, bias=False),
        DTensorLinearConfig(in_features=2, input="sequence", output="batch", local_output=False, norm="sequence", local_norm=True),
    ],
)
def test_a_sharded_dimension_of_size_1_is_refused_on_a_single_rank(config: DTensorLinearConfig) -> None:
    assert found(dtensor_linear, config, 1) == ({("execution", "")} if KNOWN else set())


def test_a_sequence_that_does_not_divide_cannot_be_exchanged_for_features() -> None:
    """``Shard(1)`` to ``Shard(-1)`` cuts its padding off by ``narrow``: a strided part, which the product's ``view`` refuses."""
    config = DTensorLinearConfig(batch=2, seq=3, in_features=2, out_features=2, style="row", input="sequence", dtensor_input=True)
    assert found(dtensor_linear, config) == ({("execution", "")} if KNOWN else set())
    assert found(dtensor_linear, replace(config, seq=4)) == set()


def test_sizes_that_do_not_divide_and_ranks_without_any() -> None:
    config = DTensorLinearConfig(batch=3, seq=5, in_features=5, out_features=2, input="sequence", output="batch", dtensor_input=True)
    for style in ("column", "row"):
        assert found(dtensor_linear, replace(config, style=style, norm="batch"), 4) == set()
