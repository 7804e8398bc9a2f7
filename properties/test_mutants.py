"""Every planted bug is killed by the check that is there for it, and correct code by none; the catalogue is as broad as it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tpverify.mutants.catalogue import catalogue
from tpverify.mutants.controls import controls
from tpverify.mutants.fate import fate_of
from tpverify.mutants.mutant import Mutant, planted
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import row_parallel_linear
from tpverify.verification import builtin_subjects, describe_checks, load_subject

MUTANTS = catalogue()
BUGS = {id: mutant for id, mutant in MUTANTS.items() if not mutant.equivalent}
EQUIVALENT = {id: mutant for id, mutant in MUTANTS.items() if mutant.equivalent}
CASES_OF_EQUIVALENT = 30


@pytest.mark.parametrize("id", BUGS)
def test_a_mutant_is_killed_by_its_named_check(id: str) -> None:
    fate = fate_of(BUGS[id], shrink=False)
    assert (fate.status, fate.killed_by) == ("killed", BUGS[id].check), f"{BUGS[id].story} Fired: {fate.fired or 'no check'}"


@pytest.mark.parametrize("id", EQUIVALENT)
def test_an_equivalent_mutant_is_killed_by_no_check(id: str) -> None:
    fate = fate_of(EQUIVALENT[id], shrink=False, max_examples=CASES_OF_EQUIVALENT)
    assert fate.status == "equivalent", f"killed by {fate.killed_by}, although {EQUIVALENT[id].equivalent}"
    assert fate.cases == CASES_OF_EQUIVALENT


def test_the_catalogue_is_broad() -> None:
    assert len(BUGS) >= 100
    assert len({mutant.kind for mutant in BUGS.values()}) >= 18
    assert {mutant.check for mutant in BUGS.values()} == set(describe_checks())
    assert len({mutant.base for mutant in BUGS.values()}) >= 8


@pytest.mark.parametrize("id", MUTANTS)
def test_a_mutant_says_what_it_is(id: str) -> None:
    mutant = MUTANTS[id]
    assert mutant.story.endswith(".") and len(mutant.story.split()) >= 5
    assert len(mutant.origin.split()) >= 2
    assert mutant.base in builtin_subjects()
    assert mutant.check in describe_checks()


def test_names_are_unique_and_lead_to_the_subject() -> None:
    names = [found.subject.name for found in (*MUTANTS.values(), *controls().values())]
    assert len(set(names)) == len(names)
    assert set(MUTANTS).isdisjoint(controls()) and set(MUTANTS).isdisjoint(builtin_subjects())
    assert load_subject(names[0]).parallel is next(iter(MUTANTS.values())).subject.parallel
    assert load_subject(names[-1]).parallel is list(controls().values())[-1].subject.parallel


class Unchanged(RowParallelLinear):
    """Nothing is wrong with it."""


class Averaged(RowParallelLinear):
    """A mean where a sum is meant."""

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """g, divided."""
        return super().reduce(partial) / self.group.size()


def mutant_of(layer: type[RowParallelLinear], check: str, **fields: str) -> Mutant:
    """A mutant that is in no catalogue."""
    subject = planted(row_parallel_linear, f"tpverify.mutants:{layer.__name__.lower()}", layer)
    about = {"id": layer.__name__.lower(), "kind": "scale", "story": str(layer.__doc__), "origin": "here"}
    return Mutant(base=row_parallel_linear.name, subject=subject, check=check, **about, **fields)  # type: ignore[arg-type]


def test_correct_code_survives() -> None:
    fate = fate_of(mutant_of(Unchanged, "forward"), max_examples=40)
    assert (fate.status, fate.killed_by, fate.fired, fate.cases, fate.case) == ("survived", "", (), 40, "")


def test_a_wrong_expected_check_shows() -> None:
    fate = fate_of(mutant_of(Averaged, "buffers"), max_examples=40)
    assert (fate.status, fate.killed_by) == ("killed", "forward")
    assert not fate.by_named_check
    assert "forward" in fate.fired and "buffers" not in fate.fired


def test_a_kill_is_shrunk_and_read() -> None:
    right = mutant_of(Averaged, "forward", diagnosis="one division too many", module="output")
    fate = fate_of(right)
    assert fate.by_named_check and fate.cases <= 20
    assert fate.case == "Case('tpverify.mutants:averaged', RowParallelLinearConfig(in_features=2, bias=False), world_size=2)"
    assert (fate.layer, fate.ranks, fate.pattern) == (True, True, True)
    wrong = dataclasses.replace(right, diagnosis="missing all_reduce", module="fc2*", ranks="last")
    assert (fate_of(wrong).layer, fate_of(wrong).ranks, fate_of(wrong).pattern) == (False, False, False)


class Untrained(RowParallelLinear):
    """A weight that gets no gradient."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Without the weight's graph."""
        return torch.nn.functional.linear(x, self.weight.detach())


def test_strength_is_of_errors_not_of_what_is_missing() -> None:
    strong, missing = fate_of(mutant_of(Averaged, "forward")), fate_of(mutant_of(Untrained, "parameter-gradient"))
    assert strong.ratio is not None and strong.ratio > 1e6
    assert missing.by_named_check and missing.ratio is None
