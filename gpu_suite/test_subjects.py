"""Every built-in subject, DTensor plans among them, is still the same model on CUDA and over NCCL; and twice in a row, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_identities import EXACT, differing
from test_subjects import SMALLER_WORLDS

from gpu_suite.conftest import Rows
from gpu_suite.drawing import drawn
from gpu_suite.places import Place
from tpverify.verification import builtin_subjects, run_case

SUBJECTS = builtin_subjects()
SLOW = ("dtensor_attention", "dtensor_llama", "dtensor_loss", "bert", "all_gather_attention_block")
"""What the tiny tier does without."""
REPEATED = ["mlp", "vocab_parallel_cross_entropy"] + [
    pytest.param(name, marks=pytest.mark.full) for name in ("attention", "gpt", "bert", "dtensor_mlp")
]


@pytest.mark.row("subjects")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in SLOW else []) for name in SUBJECTS])
def test_all_checks_hold(name: str, rows: Rows) -> None:
    rows.verify(SUBJECTS[name], SMALLER_WORLDS.get(name))


@pytest.mark.row("repeated")
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "vocab_parallel_cross_entropy",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("attention", "gpt", "bert", "dtensor_mlp")),
    ],
)
def test_the_same_case_again_gives_the_same_bits(name: str, place: Place, rows: Rows) -> None:
    cases = drawn(SUBJECTS[name], place, rows.count)
    found = []
    for case in cases:
        once, again = (run_case(SUBJECTS[name], case, world=place.world, device=place.device).parallel for _ in range(2))
        assert once.error is None and again.error is None
        found += [f"{case!r}: {label}" for label in differing(once, again)]
    rows.add(sizes=tuple({case.world_size for case in cases}), cases=len(cases), violations=len(found))
    assert found == []


@pytest.mark.row("repeated")
@pytest.mark.parametrize("name", EXACT)
def test_small_integers_are_exact(name: str, place: Place, rows: Rows) -> None:
    cases = [replace(case, values="integers") for case in drawn(SUBJECTS[name], place, rows.count)]
    rows.check(SUBJECTS[name], cases, checks=("forward", "input-gradient", "parameter-gradient", "replication"))
