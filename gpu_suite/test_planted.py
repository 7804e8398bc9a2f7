"""Bugs planted in the CPU tier are caught on CUDA and over NCCL as well, by the same checks; what only looks wrong passes there too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import planted_layers as layers
import planted_schedules as schedules
import planted_teaching_block as block
import pytest
from test_calls import AGAIN, Sizes
from test_calls import SUBJECTS as CALLED
from test_dtensor_subjects import LLAMA
from test_hard_cases import CASES as HARD_CASES

import tpverify as tpv
from gpu_suite import reused
from gpu_suite.conftest import Rows
from gpu_suite.drawing import drawn
from gpu_suite.places import Place
from gpu_suite.showing import PAIR, NotShownError, broken, missed, ranks_needed, showing
from tpverify.case import Case
from tpverify.lookup import addressed
from tpverify.mutants.catalogue import catalogue
from tpverify.mutants.controls import controls
from tpverify.mutants.mutant import Mutant
from tpverify.subjects.dtensor_llama import dtensor_llama
from tpverify.subjects.dtensor_mlp import DTensorMLPConfig, dtensor_mlp
from tpverify.verification import builtin_subjects, read_case

LAYERS = {
    layers.input_gradient_not_reduced: {"input-gradient", "communication", "replication"},
    layers.reduced_both_ways: {"parameter-gradient", "input-gradient", "communication"},
    layers.reduced_both_ways_in_mlp: {"parameter-gradient", "communication"},
    layers.bias_before_reduction: {"forward"},
    layers.reduced_twice: {"forward", "communication"},
    layers.gather_before_gelu: {"communication"},
    layers.mask_start_off_by_one: {"vocabulary", "forward"},
    layers.mask_stop_off_by_one: {"vocabulary", "forward"},
    layers.mask_forgotten: {"vocabulary", "forward"},
    layers.column_joined_backwards: {"forward"},
    layers.logit_shards_swapped: {"forward", "input-gradient"},
    layers.local_maximum: {"forward", "input-gradient"},
    layers.local_smoothing: {"forward", "replication", "communication"},
    layers.norm_gradient_partial: {"replication", "parameter-gradient", "communication"},
    block.as_published: {"parameter-gradient", "communication"},
}
"""What everybody does wrong once, and the checks that say so in the CPU tier."""
MODELS = ("gpt", "bert", "transformer_block", "dtensor_llama", "dtensor_attention")
"""Subjects whose cases are slow to search."""


def one_of_each(mutants: Iterable[Mutant]) -> dict[str, Mutant]:
    """By id, one bug of each kind for each check that must find it; of a whole model only where no layer has one."""
    found: dict[tuple[str, str], Mutant] = {}
    for mutant in sorted((mutant for mutant in mutants if not mutant.equivalent), key=lambda mutant: (mutant.base in MODELS, mutant.id)):
        found.setdefault((mutant.kind, mutant.check), mutant)
    return {mutant.id: mutant for mutant in found.values()}


MUTANTS = one_of_each(catalogue().values())
ALL = {subject.name: (subject, checks, "float64") for subject, checks in LAYERS.items()} | {
    id: (mutant.subject, {mutant.check}, mutant.dtype) for id, mutant in MUTANTS.items()
}
TINY = ("reduced_twice", "mask_forgotten", "column_joined_backwards")
"""What is enough to keep the path alive."""
REFUSED_BY_NCCL = {id for id, mutant in MUTANTS.items() if mutant.kind == "contiguity"}
"""NCCL raises where others compute something: ``execution`` may be the check that tells there."""
BY_CHANCE = {id for id, mutant in MUTANTS.items() if mutant.kind == "asynchronous"}
"""Read too early: the simulator holds every result back until it is waited for, a real backend may have it in time."""

CONTROLS = [*(control.subject for control in controls().values()), block.corrected]
FEW_CONTROLS = 3
"""In the tiny tier."""
SCHEDULES = [
    schedules.maximum_on_one_rank,
    schedules.skipped_on_one_rank,
    schedules.single_precision_on_one_rank,
    schedules.swapped_on_one_rank,
    schedules.skipped_without_target,
]
WRONG_AGAIN = [
    (reused.stale_cache, AGAIN, "forward"),
    (reused.shared_buffer, ["interleaved"], "parameter-gradient"),
    (reused.hook_on_accumulated, AGAIN, "parameter-gradient"),
]


def caught(rows: Rows, name: str, cases: int, lost: set[str]) -> None:
    """Count one planted bug, and fail if checks missed it."""
    rows.add(sizes=PAIR, cases=cases, planted=1, caught=not lost)
    assert not lost, f"{name}: not found by {', '.join(sorted(lost))}"


@pytest.mark.row("planted bugs")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in TINY else pytest.mark.full) for name in ALL])
def test_a_bug_is_caught_by_the_same_checks(name: str, place: Place, rows: Rows) -> None:
    subject, checks, dtype = ALL[name]
    rows.need_several()
    if name in BY_CHANCE and place.world != "simulator":
        rows.not_run("shows by chance over a real backend; in test_streams.py a rank comes late so that it must")
    try:
        shown = showing(subject, frozenset(checks), dtype)
    except NotShownError as problem:  # the CPU tier draws more cases than there is time for here
        rows.not_run(str(problem))
        return
    if place.most_ranks is not None and ranks_needed(shown) > place.most_ranks:
        rows.not_run(f"takes {ranks_needed(shown)} ranks")
    lost = missed(subject, checks, place, dtype)
    if name in REFUSED_BY_NCCL and place.world == "nccl" and lost:
        lost = {"execution"} - broken(subject, shown, place.world, place.device)
    caught(rows, name, len(shown), lost)


@pytest.mark.row("schedules that differ")
@pytest.mark.parametrize("subject", SCHEDULES, ids=lambda subject: subject.name)
def test_ranks_that_disagree_are_named(subject: tpv.Subject, place: Place, rows: Rows) -> None:
    rows.need_several()
    caught(rows, subject.name, 1, missed(subject, {"communication"}, place))


@pytest.mark.row("ranks that fail")
@pytest.mark.parametrize(
    ("what", "check"), [("raise", "execution"), ("skip", "communication"), ("bigger", "communication"), ("kill", "execution")]
)
def test_a_rank_that_fails_is_named_and_the_next_case_runs(what: str, check: str, place: Place, rows: Rows) -> None:
    rows.need_several()
    if what == "kill" and place.world == "simulator":
        rows.not_run("a simulated rank has no process to kill")
    subject = addressed(reused.behaving)
    case = Case(subject.name, reused.Behaviour(what), 2)
    lost = {check} - broken(subject, [case], place.world, place.device)
    after = broken(subject, [replace(case, config=reused.Behaviour())], place.world, place.device)
    caught(rows, what, 2, lost | after)


@pytest.mark.row("calls")
@pytest.mark.parametrize(("subject", "wrong", "check"), WRONG_AGAIN, ids=["stale cache", "shared buffer", "accumulated"])
def test_what_is_wrong_from_the_second_call_on_is_caught(
    subject: tpv.Subject, wrong: list[str], check: str, place: Place, rows: Rows
) -> None:
    rows.need_several()
    subject = addressed(subject)
    found = {calls: broken(subject, [Case(subject.name, Sizes(), 2, calls=calls)], place.world, place.device) for calls in ("once", *AGAIN)}
    lost = {f"{check} in {calls}" for calls in wrong if check not in found[calls]}
    caught(rows, subject.name, len(found), lost | found["once"])


@pytest.mark.row("DTensor plans")
@pytest.mark.parametrize(
    ("subject", "right", "config", "check"),
    [
        (reused.plan_without_reduction, dtensor_mlp, DTensorMLPConfig(seq=2, hidden=3, ffn=4), "forward"),
        (reused.plan_with_plain_norm, dtensor_llama, LLAMA, "parameter-gradient"),
    ],
    ids=["without a reduction", "plain norm"],
)
def test_a_wrong_plan_is_caught(subject: tpv.Subject, right: tpv.Subject, config: object, check: str, place: Place, rows: Rows) -> None:
    rows.need_several()
    subject = addressed(subject)
    wrong, clean = (broken(each, [Case(each.name, config, 2)], place.world, place.device) for each in (subject, right))
    caught(rows, subject.name, 2, ({check} - wrong) | clean)


@pytest.mark.row("controls")
@pytest.mark.parametrize(
    "subject", [pytest.param(each, marks=pytest.mark.full if i >= FEW_CONTROLS else [], id=each.name) for i, each in enumerate(CONTROLS)]
)
def test_what_only_looks_wrong_passes(subject: tpv.Subject, rows: Rows) -> None:
    rows.verify(subject)


@pytest.mark.row("calls")
@pytest.mark.parametrize("calls", AGAIN)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in ("mlp", "gpt") else pytest.mark.full) for name in CALLED])
def test_what_is_right_is_right_in_every_call(name: str, calls: str, place: Place, rows: Rows) -> None:
    subject = builtin_subjects()[name]
    cases = [replace(case, calls=calls) for case in drawn(subject, place, rows.count)]
    rows.check(subject, cases)


@pytest.mark.row("calls")
@pytest.mark.parametrize("subject", [reused.gather_in_every_call, reused.hook_on_gradient], ids=["gather", "hook"])
def test_what_is_right_in_every_call_passes(subject: tpv.Subject, place: Place, rows: Rows) -> None:
    subject = addressed(subject)
    rows.check(subject, [Case(subject.name, Sizes(), place.sizes[-1], calls=calls) for calls in ("once", *AGAIN)])


@pytest.mark.row("controls")
@pytest.mark.parametrize("text", HARD_CASES)
def test_no_wolf(text: str, rows: Rows) -> None:
    subject, case = read_case(text)
    rows.check(subject, [case])
