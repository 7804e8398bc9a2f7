"""The simulator certified: whatever it says of a program of collectives or of a subject, a real backend on the same device says too."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

from gpu_suite.conftest import Rows
from gpu_suite.drawing import drawn, search
from gpu_suite.places import Place
from tpverify.conformance.certify import slack
from tpverify.conformance.comparison import PREFIX, Outcome, unequal_errors, unequal_ledgers, unequal_outputs
from tpverify.conformance.differences import without_differences
from tpverify.conformance.program import Program
from tpverify.conformance.programs import programs
from tpverify.conformance.subject import case_of
from tpverify.conformance.subject import programs as interpreted
from tpverify.run import Comparison, RankRun
from tpverify.tolerance import relative_error, tolerance
from tpverify.verification import builtin_subjects, run_case

SUBJECTS = builtin_subjects()
COMPARED = (
    "column_parallel_linear",
    "row_parallel_linear",
    "attention",
    "vocab_parallel_embedding",
    "vocab_parallel_cross_entropy",
    "gpt",
    "dtensor_mlp",
    "dtensor_embedding",
)
IN_TINY = ("attention", "gpt")
NCCL_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32")
NCCL_OPS = ("SUM", "PRODUCT", "MIN", "MAX")
NOT_NCCL = ("recv_from_any", "send_recv")
"""NCCL takes messages from a named rank only, and has no tags."""


def outcome(program: Program, world: str, device: str) -> Outcome:
    """What a world on a device makes of a program; results on the CPU."""
    run = run_case(interpreted, case_of(program), world=world, device=device).parallel
    outputs: list[Mapping[str, Tensor]] = [
        {
            label[len(PREFIX) : -1]: placed.local.cpu()
            for label, placed in rank.outputs.items()
            if label.startswith(PREFIX) and placed.local is not None
        }
        for rank in run.ranks
    ]
    return Outcome(outputs, run.error, run.ledger)


def for_nccl(program: Program) -> Program:
    """The program without what NCCL refuses by design: other dtypes and ops, other layouts than contiguous, and faults."""
    steps = tuple(
        step
        for step in program.steps
        if step.dtype in NCCL_DTYPES
        and step.layout == "contiguous"
        and not step.fault
        and step.call not in NOT_NCCL
        and (step.op in NCCL_OPS or not step.reduces and step.call != "coalescing_manager")
    )
    return Program(program.world_size, steps, program.groups, program.values, program.seed)


def differences(program: Program, place: Place) -> list[str]:
    """Where the simulator and the place's world differ, one line each."""
    ours, theirs = outcome(program, "simulator", place.device), outcome(program, place.world, place.device)
    if ours.error is not None or theirs.error is not None:
        return unequal_errors(ours.error, theirs.error)
    assert ours.ledger is not None and theirs.ledger is not None
    unequal = unequal_outputs(ours, theirs.outputs, None)
    if unequal and program.values == "normal":
        unequal = unequal_outputs(ours, theirs.outputs, slack(program))
    return unequal_ledgers(ours.ledger, theirs.ledger, program.world_size) + unequal


@pytest.mark.row("programs")
@pytest.mark.against_the_simulator
def test_programs_of_collectives(place: Place, rows: Rows) -> None:
    sizes = rows.place.largest_sizes
    found: list[str] = []
    compared: list[Program] = []

    def compare(program: Program) -> bool:
        kept = for_nccl(program) if place.world == "nccl" else without_differences(program, place.world)[0]
        if kept.steps:
            compared.append(kept)
            found.extend(f"{kept!r}: {line}" for line in differences(kept, place))
        return bool(found) or len(compared) == rows.count

    search(programs(sizes), 10 * rows.count, compare)
    rows.add(sizes=tuple({program.world_size for program in compared}), cases=len(compared), violations=len(found))
    assert found == []


def tensors(rank: RankRun) -> dict[str, Tensor]:
    """Outputs and gradients, by what they are."""
    return {
        f"{kind} {name}": placed.local
        for kind in ("outputs", "input_gradients", "parameter_gradients")
        for name, placed in getattr(rank, kind).items()
        if placed.local is not None
    }


def unlike(simulated: Comparison, real: Comparison) -> list[str]:
    """Where two runs of one case differ: collectives at all, numbers by more than another order of summation explains."""
    found = unequal_ledgers(simulated.parallel.ledger, real.parallel.ledger, simulated.case.world_size)
    found += unequal_errors(simulated.parallel.error, real.parallel.error)
    bound = tolerance(simulated.subject.precision, simulated.reference.depth, simulated.reference.terms)
    for rank, (one, other) in enumerate(zip(simulated.parallel.ranks, real.parallel.ranks, strict=True)):
        mine, others = tensors(one), tensors(other)
        found += [f"rank {rank} has {list(mine)} and {list(others)}"] if list(mine) != list(others) else []
        for label in mine.keys() & others.keys():
            error = relative_error(others[label], mine[label])
            found += [f"rank {rank} {label}: off by {error:.1e}"] if error > bound else []
    return found


@pytest.mark.row("agreement")
@pytest.mark.against_the_simulator
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_TINY else pytest.mark.full) for name in COMPARED])
def test_outputs_gradients_and_ledger_of_a_subject(name: str, place: Place, rows: Rows) -> None:
    cases = [case for case in drawn(SUBJECTS[name], place, 4 * rows.count) if case.groups == "world"][: rows.count]
    found = []
    for case in cases:
        worlds = ("simulator", place.world)
        simulated, real = (run_case(SUBJECTS[name], case, world=world, device=place.device) for world in worlds)
        found += [f"{case!r}: {line}" for line in unlike(simulated, real)]
    rows.add(sizes=tuple({case.world_size for case in cases}), cases=len(cases), violations=len(found))
    assert cases and found == []
