"""Runs that must agree in every bit: the same case again, under another schedule, or exact in another order of reduction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpverify.case import Case
from tpverify.checks.catalogue import apply, selected
from tpverify.run import Run
from tpverify.runner import run_both
from tpverify.simulator.collectives import REDUCTION_ORDERS
from tpverify.strategies import cases
from tpverify.subjects.linear_subjects import RowParallelLinearConfig
from tpverify.subjects.subject import Subject
from tpverify.tolerance import bitwise_equal
from tpverify.verification import builtin_subjects

# The two slowest subjects are left out: they issue their collectives through the same DTensor code as the others.
SUBJECTS = {name: subject for name, subject in builtin_subjects().items() if name not in ("dtensor_attention", "dtensor_llama")}
EXACT = ["column_parallel_linear", "row_parallel_linear", "vocab_parallel_embedding"]
SIZES = (1, 2, 3, 4, 5, 8)


def tensors(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for rank, part in enumerate(run.ranks):
        for kind in ("outputs", "input_gradients", "parameter_gradients"):
            for name, placed in getattr(part, kind).items():
                if placed.local is not None:
                    yield f"{kind} {name} on rank {rank}", placed.local


def differing(a: Run, b: Run) -> list[str]:
    mine, other = dict(tensors(a)), dict(tensors(b))
    assert mine.keys() == other.keys()
    return [label for label, tensor in mine.items() if not bitwise_equal(tensor, other[label])]


@pytest.mark.parametrize("name", SUBJECTS)
@settings(max_examples=max(5, settings.default.max_examples // 3))
@given(data=st.data())
def test_a_schedule_changes_nothing(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(SUBJECTS[name], SIZES))
    schedule = data.draw(st.integers(0, 2**16))
    for once, again in zip(run_both(SUBJECTS[name], case), run_both(SUBJECTS[name], case, schedule=schedule), strict=True):
        assert differing(once.parallel, again.parallel) == []
        if once.parallel.error is None:  # how far ranks get before one of them refuses is the schedule's affair
            assert once.parallel.ledger.counts() == again.parallel.ledger.counts()


def _reduced(subject: Subject, case: Case, order: str) -> Run:
    comparison = run_both(subject, case, reduction_order=order)[0]
    assert not any(apply(selected(["forward", "input-gradient", "parameter-gradient", "replication"]), comparison).values())
    return comparison.parallel


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
def test_small_integers_are_exact_in_every_order(name: str, data: st.DataObject) -> None:
    subject = SUBJECTS[name]
    drawn = data.draw(cases(subject, SIZES).filter(lambda case: not (subject.rejects and subject.rejects(case.config, case.world_size))))
    case = Case(drawn.subject, drawn.config, drawn.world_size, drawn.seed, values="integers")
    runs = [_reduced(subject, case, order) for order in REDUCTION_ORDERS]
    assert [differing(runs[0], run) for run in runs[1:]] == [[]] * (len(runs) - 1)


def test_orders_do_differ_where_arithmetic_is_not_exact() -> None:
    """The twin: with Gaussian values another order of reduction shows in some bit."""
    subject = SUBJECTS["row_parallel_linear"]
    seen = []
    for seed in range(5):
        config = RowParallelLinearConfig(seq=4, batch=3, in_features=8, out_features=6)
        runs = [run_both(subject, Case(subject.name, config, 8, seed), reduction_order=order)[0].parallel for order in REDUCTION_ORDERS]
        seen += differing(runs[0], runs[1]) + differing(runs[0], runs[2])
    assert seen
