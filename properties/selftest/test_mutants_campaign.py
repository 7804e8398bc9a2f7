"""What a campaign makes of fates and passes: score, survivors, refuted arguments, flagged controls, margins, and how it is told."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from tpverify.mutants.fate import Fate
from tpverify.mutants.margins import Strength, margins_of
from tpverify.mutants.matrix import render, score_line
from tpverify.mutants.mutant import Mutant
from tpverify.mutants.outcome import Campaign, Pass, Trouble
from tpverify.subjects.linear_subjects import row_parallel_linear
from tpverify.violation import Violation

VIOLATION = Violation("forward", "layer", 2, (0, 1), "output", "Expected output to equal the reference", "one division too many")


def mutant(id: str, **fields: Any) -> Mutant:
    """A mutant of which nothing is run."""
    about = {"kind": "scale", "story": f"The story of {id}.", "origin": "somewhere", "base": "row_parallel_linear", "check": "forward"}
    about |= {"diagnosis": "one reduction too many", "module": "weight"}
    return Mutant(id=id, subject=row_parallel_linear, **{**about, **fields})


def fate(id: str, **fields: Any) -> Fate:
    """A mutant that its named check has killed, and whose report names everything."""
    right = {
        "status": "killed",
        "expected_check": "forward",
        "killed_by": "forward",
        "fired": ("forward",),
        "cases": 3,
        "case": "Case(...)",
        "violations": (VIOLATION,),
        "ratio": 50.0,
        "layer": True,
        "ranks": True,
        "pattern": True,
    }
    return Fate(**{"id": id, "kind": "scale", "subject": "row_parallel_linear", **right, **fields})


def passed(id: str = "control", **fields: Any) -> Pass:
    """A control that nothing flagged."""
    return Pass(**{"id": id, "cases": 40, "applied": ("forward",), "largest": {("forward", "float64"): 0.5}, **fields})


def campaign(*fates: Fate, mutants: tuple[Mutant, ...] = (), **fields: Any) -> Campaign:
    """A whole campaign of these fates; mutants that are not given are made up."""
    given = {mutant.id: mutant for mutant in mutants}
    return Campaign(
        **{
            "seed": 0,
            "whole": True,
            "fates": fates,
            "passes": (passed(),),
            "mutants": {fate.id: given.get(fate.id, mutant(fate.id)) for fate in fates},
            **fields,
        }
    )


def text(of: Campaign, **options: bool) -> str:
    """What people see."""
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None).print(render(of, **options), soft_wrap=True)
    return stream.getvalue()


SURVIVED = {"status": "survived", "killed_by": "", "fired": (), "case": "", "violations": (), "ratio": None}
EQUIVALENT = {**SURVIVED, "status": "equivalent"}
SAME = mutant("same", equivalent="It adds zero.")


def test_all_killed_is_passed() -> None:
    done = campaign(fate("a"), fate("b"), fate("same", **EQUIVALENT), mutants=(SAME,))
    assert done.passed and done.score == 1.0
    assert score_line(done) == (
        "2 of 2 mutants killed by their named check (100.0 %), 1 equivalent, 1 kind; 1 of 1 correct subjects unflagged; "
        "named: layer 100 % of 2, ranks 100 % of 2, pattern 100 % of 2"
    )
    assert "  same (3 cases): The story of same. It adds zero." in text(done)


@pytest.mark.parametrize(
    ("done", "says"),
    [
        (campaign(fate("a"), fate("b", **SURVIVED)), "Survived:\n  b: The story of b."),
        (campaign(fate("a", killed_by="buffers", fired=("buffers",))), "a: expected forward but got buffers (The story of a.)"),
        (campaign(fate("a"), fate("same"), mutants=(SAME,)), "same: killed by forward on Case(...), although It adds zero."),
        (campaign(fate("a"), passes=(passed(violations=(VIOLATION,)),)), "control: forward output: Expected output to equal the reference"),
        (campaign(fate("a"), passes=(passed(cases=0),)), "control: nothing was checked"),
        (campaign(fate("a"), troubles=(Trouble("b", "KeyError: 'x'"),)), "b: KeyError: 'x'"),
        (campaign(fate("a", ratio=4.0)), "forward in float64: 8; a has 4 times the bound, correct code 0.5"),
        (campaign(fate("a", pattern=False)), "a: expected 'one reduction too many' but got 'one division too many'"),
        (campaign(fate("a", layer=False)), "a: expected 'weight' but got output"),
        (campaign(fate("a", ranks=False)), "a: expected all of 2 ranks but got output 0, 1"),
    ],
    ids=["survivor", "wrong check", "refuted", "flagged", "nothing checked", "trouble", "narrow", "pattern", "layer", "ranks"],
)
def test_each_way_to_fail_fails_and_is_told(done: Campaign, says: str) -> None:
    assert not done.passed
    assert says in text(done)
    assert done.as_dict()["passed"] is False


def test_of_a_few_mutants_one_may_go_unnamed() -> None:
    done = dataclasses.replace(campaign(fate("a", pattern=False)), whole=False)
    assert done.passed and done.named("pattern") == 0.0


def test_what_cannot_be_stated_does_not_count() -> None:
    unstated = mutant("b", diagnosis="")
    done = campaign(fate("a", pattern=False), fate("b"), mutants=(unstated,))
    assert done.named("pattern") == 0.0 and done.named("layer") == 1.0
    assert "pattern 0 % of 1" in score_line(done)


def test_an_interrupted_campaign_is_not_passed_and_shows_what_is_known() -> None:
    done = campaign(fate("a"), interrupted=True)
    assert not done.passed and done.as_dict()["interrupted"]
    assert "1 of 1 mutants killed" in text(done)


def test_one_unnamed_in_twenty_is_enough_and_one_in_nineteen_is_not() -> None:
    assert campaign(fate("a", ranks=False), *(fate(str(number)) for number in range(19))).passed
    assert not campaign(fate("a", ranks=False), *(fate(str(number)) for number in range(18))).passed


def test_no_mutants_are_no_success() -> None:
    assert not campaign().passed
    assert campaign(fate("same", **EQUIVALENT), mutants=(SAME,)).passed


def test_the_matrix_marks_every_check_that_fired() -> None:
    done = campaign(fate("a", fired=("forward", "tied")), fate("b", killed_by="tied", fired=("tied",)), fate("c", **SURVIVED))
    rows = {line.split()[0]: line for line in text(done).splitlines() if line.startswith("  ") and "row_parallel_linear" in line}
    marks = {id: [letter for letter in row if letter in "●○✗"] for id, row in rows.items()}
    assert marks == {"a": ["●", "○"], "b": ["✗", "○"], "c": ["✗"]}
    assert "scale: 1 of 3" in text(done)


def test_quiet_keeps_the_score_and_verbose_tells_stories() -> None:
    done = campaign(fate("a"))
    assert text(done, quiet=True).splitlines() == [score_line(done)]
    assert "The story of a." not in text(done)
    told = text(done, verbose=True)
    assert "a (scale; forward of row_parallel_linear)\n  The story of a.\n  Seen in: somewhere" in told
    assert 'Replay: tpverify replay "Case(...)"' in told


def test_the_document_says_what_was_asked_for() -> None:
    done = campaign(fate("a", seconds=1.23456), fate("same", **EQUIVALENT), mutants=(SAME,))
    document = json.loads(json.dumps(done.as_dict(), allow_nan=False))
    assert set(document) == {
        "schema_version", "passed", "interrupted", "seed", "score", "counts", "kinds", "named", "controls", "margins", "mutants", "errors"
    }  # fmt: skip
    first, same = document["mutants"]
    expected = {
        "id": "a",
        "kind": "scale",
        "subject": "row_parallel_linear",
        "status": "killed",
        "killed_by": "forward",
        "expected_check": "forward",
        "diagnosis": "one division too many",
        "cases": 3,
        "seconds": 1.235,
        "case": "Case(...)",
    }
    assert {key: first[key] for key in expected} == expected
    assert (same["status"], same["equivalent"]) == ("equivalent", "It adds zero.")
    assert document["kinds"] == {"scale": {"mutants": 2, "killed": 1, "equivalent": 1}}
    assert document["score"] == 100.0


def test_a_margin_is_the_weakest_killed_over_the_largest_clean() -> None:
    strong, weak = Strength("strong", "forward", "bfloat16", 90.0), Strength("weak", "forward", "bfloat16", 6.0)
    clean = [{("forward", "bfloat16"): 0.1}, {("forward", "bfloat16"): 0.3, ("tied", "float32"): 0.2}]
    forward, tied = margins_of([strong, weak], clean)
    assert (forward.check, forward.dtype, forward.clean, forward.weakest, round(forward.value, 6)) == (
        "forward",
        "bfloat16",
        0.3,
        weak,
        20.0,
    )
    assert (tied.check, tied.weakest, tied.value) == ("tied", None, math.inf)
    assert tied.as_dict() == {"check": "tied", "dtype": "float32", "clean": 0.2, "weakest": "", "killed": None, "margin": None}


def test_an_exact_check_has_no_end_of_margin() -> None:
    (margin,) = margins_of([Strength("a", "forward", "float64", 6.0)], [{("forward", "float64"): 0.0}])
    assert margin.value == math.inf
