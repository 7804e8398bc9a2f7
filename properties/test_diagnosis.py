"""What a report says of planted bugs: the pattern, the module and the ranks, on the case that shrinking ends with."""

from __future__ import annotations

import dataclasses

import pytest

from tpverify.case import parse_case
from tpverify.checks.catalogue import COMPARING, apply, selected
from tpverify.checks.diagnosing import undiagnosed
from tpverify.lookup import config_types
from tpverify.mutants.catalogue import catalogue
from tpverify.mutants.fate import fate_of
from tpverify.runner import run_both

MUTANTS = catalogue()
SAID = {
    "shared-heads-not-reduced": "where several ranks hold one unit (ranks 0, 1",
    "positions-added-before-the-sum": "every row holds rows of position.weight 2 times instead of once",
    "last-rank-left-out": "only zeros come from rank 1",
    "recursive-doubling": "of which some are counted twice: a wrong group fits this (in a larger case",
    "gradient-one-percent-larger": "every rank holds 1.01 times the expected value: a constant factor fits this (in a larger case",
    "maximum-by-sum": "SUM stands where MAX is declared: a wrong reduce op fits this",
    "reduced-then-cut": "all_reduce stands where reduce_scatter is declared: a wrong kind of collective fits this",
    "finalized-one-by-one": "4 elements travel where 16 are declared",
    "reduced-within-the-node": "goes over the whole TP group: a wrong group fits this",
    "own-exponentials-only": "cross_entropy.py:101 sees the parts of all ranks",
    "cut-without-sum": "is summed over all ranks: a missing all_reduce fits this",
    "target-logit-detached": "a detached branch fits this",
    "softmax-in-bfloat16": "its rounding fits this",
    "keys-of-the-first-call": "right if the module is called once only: what an earlier call left behind, stale data fits this",
    "part-of-global-rank": "right if there is one TP group in the world: a wrong group or rank fits this",
}
"""By mutant; one for each way in which a line comes about."""


@pytest.mark.parametrize("id", SAID)
def test_the_report_on_the_shrunk_case_names_the_fault(id: str) -> None:
    fate = fate_of(MUTANTS[id])
    said = [violation.diagnosis for violation in fate.violations]
    assert any(SAID[id] in line for line in said), said
    assert (fate.layer, fate.ranks, fate.pattern) == (True, True, True)


UNEXPLAINED = ("keys-tiled", "head-constants-from-zero")
"""Bugs that no pattern and no repair takes back."""


@pytest.mark.parametrize("id", UNEXPLAINED)
def test_nothing_is_said_to_fit_where_nothing_does(id: str) -> None:
    fate = fate_of(dataclasses.replace(MUTANTS[id], diagnosis="anything"))
    assert fate.status == "killed" and not fate.pattern
    assert not any("fits this" in violation.diagnosis for violation in fate.violations)


@pytest.mark.parametrize("id", ["shared-heads-not-reduced", "tied-gradient-doubled", "bias-before-reduction"])
def test_whoever_asks_for_no_diagnosis_gets_the_same_findings_without_one(id: str) -> None:
    mutant = MUTANTS[id]
    case = parse_case(fate_of(mutant).case, config_types(mutant.subject))
    (comparison,) = run_both(mutant.subject, case)
    with undiagnosed():
        bare = apply(selected(None), comparison)
    told = apply(selected(None), comparison)
    assert any(finding.diagnosis for findings in told.values() for finding in findings or ())
    for check in COMPARING:
        silent = [dataclasses.replace(finding, diagnosis="") for finding in told[check] or ()]
        assert bare[check] == (silent if told[check] is not None else None)
    assert any(bare[check] for check in COMPARING)
