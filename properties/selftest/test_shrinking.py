"""Failures are reported on the smallest case that shows them, each by itself, in bounded time; and as a pytest property."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from bent_subjects import Parallel, Sizes, bent, found, loops_on_rank_1, parallel, right, verified, with_output
from hypothesis import strategies as st
from torch import Tensor, nn

import tpverify as tpv
from tpverify import exploration, options, verification
from tpverify.case import parse_case
from tpverify.lookup import read_case
from tpverify.verification import CheckFailed, property_test, typical_case


def wrong_where(condition: Any, *, subgroups: bool = True) -> tpv.Subject:
    """A subject whose output is wrong for some cases only."""

    def forward(module: Parallel, x: Tensor) -> Tensor:
        output: Tensor = Parallel.forward(module, x)
        return output * 2 if condition(dist.get_world_size(module.group), x) else output

    return parallel(forward, subgroups=subgroups, exact=False)


def smallest(subject: tpv.Subject, **given: Any) -> str:
    """The case of the forward violation, without the subject's name."""
    result = tpv.verify(subject, max_examples=60, checks=("forward",), **given)
    return next(violation.case.partition(", ")[2].removesuffix(")") for violation in result.violations if violation.tensor == "output")


def test_a_bug_that_needs_three_ranks_and_a_sequence_is_shrunk_to_just_that() -> None:
    subject = wrong_where(lambda world_size, x: world_size == 3 and x.shape[0] > 1)
    assert smallest(subject) == "Sizes(seq=2, features=3), world_size=3"
    assert smallest(subject, seed=5) == "Sizes(seq=2, features=3), world_size=3"
    assert verified(subject, world_sizes=(1, 2), max_examples=20).passed


@pytest.mark.parametrize(
    ("condition", "case"),
    [
        (lambda world_size, x: True, "Sizes(), world_size=1"),
        (lambda world_size, x: world_size > 1, "Sizes(features=2), world_size=2"),
        (lambda world_size, x: not x.is_contiguous() and x.stride(-1) == 2, "Sizes(features=2), world_size=1, layout='sliced'"),
        (lambda world_size, x: dist.get_world_size() > world_size, "Sizes(), world_size=1, groups='blocks'"),
    ],
)
def test_nothing_that_the_bug_does_not_need_stays_in_the_case(condition: Any, case: str) -> None:
    assert smallest(wrong_where(condition)) == case


class TwoFaults(Parallel):
    """One output is wrong on two ranks, the other one on four."""

    def forward(self, x: Tensor) -> Any:
        """Two outputs."""
        output, size = super().forward(x), dist.get_world_size(self.group)
        return output + (size == 2), output * (2 if size == 4 and x.shape[0] > 1 else 1)


def test_different_failures_are_shrunk_each_by_itself() -> None:
    subject = bent(reference=with_output(lambda y: (y, y)).reference, parallel=TwoFaults, exact=False)
    result = tpv.verify(subject, max_examples=60, checks=("forward",))
    cases = {violation.tensor: violation.case for violation in result.violations}
    assert cases["output[0]"] == "Case('bent', Sizes(features=2), world_size=2)"
    assert cases["output[1]"] == "Case('bent', Sizes(seq=2, features=4), world_size=4)"


def test_every_reported_case_shows_its_failure_again() -> None:
    subject = bent(reference=with_output(lambda y: (y, y)).reference, parallel=TwoFaults)
    result = tpv.verify(subject, max_examples=6, world_sizes=(2,))
    assert result.violations
    for violation in result.violations:
        again = tpv.check_case(subject, parse_case(violation.case, {"Sizes": Sizes}))
        assert (violation.check, violation.tensor, violation.message) in [(v.check, v.tensor, v.message) for v in again]


def test_a_run_that_times_out_is_not_tried_again() -> None:
    result = verified(parallel(loops_on_rank_1), timeout=0.3)
    assert (result.cases_run, found(result.violations)) == (1, [("execution", "")])


@pytest.mark.parametrize("drawn_after", [50, 1], ids=["while drawing", "while shrinking"])
def test_a_slow_subject_is_not_explored_for_ages(monkeypatch: pytest.MonkeyPatch, drawn_after: int) -> None:
    monkeypatch.setattr(exploration, "CASES_AFTER_FAILURE", drawn_after)
    subject = wrong_where(lambda world_size, x: x.shape[0] == 3)
    patient = verified(subject, max_examples=30, checks=("forward",), seed=4)
    assert {violation.case for violation in patient.violations} == {"Case('bent', Sizes(seq=3, features=2), world_size=2)"}
    clock: Iterator[float] = itertools.count(0.0, 70.0)  # every look at the clock finds another 70 s gone
    monkeypatch.setattr(exploration.time, "monotonic", lambda: next(clock))
    hasty = verified(subject, max_examples=30, checks=("forward",), seed=4)
    assert found(hasty.violations) == found(patient.violations)
    assert hasty.cases_run < patient.cases_run - 4


def test_a_smaller_case_that_the_reference_cannot_run_does_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    shrunk: list[Any] = []
    shrink = exploration.Explorer._shrink
    monkeypatch.setattr(exploration.Explorer, "_shrink", lambda self, *given: shrunk.append(given) or shrink(self, *given))

    def reference(c: Sizes) -> nn.Module:
        if shrunk and c.out == 2:
            raise RuntimeError("I never liked two")
        return right.reference(c)

    def parallel(c: Sizes) -> nn.Module:
        return right.parallel(c) if c.out == 1 else wrong_where(lambda world_size, x: True).parallel(c)

    subject = bent(reference=reference, parallel=parallel, configs=lambda w: st.builds(Sizes, features=st.just(w), out=st.integers(1, 999)))
    result = verified(subject, checks=("forward",), max_examples=4)
    assert [violation.case for violation in result.violations] == ["Case('bent', Sizes(features=2, out=3), world_size=2)"]
    with pytest.raises(tpv.SubjectError, match="I never liked two"):
        tpv.check_case(subject, tpv.Case("bent", Sizes(features=2, out=2), 2))


def left() -> list[dict[str, Any]]:
    """The results that property tests left, taken so that this session's summary does not count them."""
    results = list(verification.pending_results)
    verification.pending_results.clear()
    return results


def test_a_property_that_holds_leaves_its_result() -> None:
    test = property_test(right, world_sizes=(2,))
    assert (test.__name__, test.__doc__) == ("test_right", "All checks hold for right.")
    test()
    (result,) = left()
    assert (result["name"], result["passed"], set(result["world_sizes"])) == ("bent_subjects:right", True, {"2"})


def test_a_property_that_fails_says_it_all_on_the_smallest_case() -> None:
    test = property_test(wrong_where(lambda world_size, x: world_size > 1), checks=("forward",))
    with pytest.raises(CheckFailed) as error:
        test()
    first, *_, case, replay = str(error.value).splitlines()
    assert first == "tpverify: forward check failed: bent, world_size=2, ranks 0 and 1"
    assert case == "Failing test case: Case('bent', Sizes(features=2), world_size=2)"
    assert replay == "Replay: tpverify replay \"Case('bent', Sizes(features=2), world_size=2)\""
    (result,) = left()
    assert (result["passed"], [violation["case"] for violation in result["violations"]]) == (False, [case.partition(": ")[2]])
    json.dumps(result)


def test_a_property_takes_its_world_sizes_from_the_environment_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.WORLD_SIZES_VARIABLE, "3")
    property_test(right)()
    property_test(right, world_sizes=(1,))()
    assert [set(result["world_sizes"]) for result in left()] == [{"3"}, {"1"}]
    monkeypatch.setenv(options.WORLD_SIZES_VARIABLE, "0")
    with pytest.raises(tpv.CaseError):
        property_test(right)
    monkeypatch.delenv(options.WORLD_SIZES_VARIABLE)
    monkeypatch.setenv(options.WORLD_VARIABLE, "glo")
    with pytest.raises(tpv.CaseError):
        property_test(right)


@pytest.mark.parametrize("given", [{"world_sizes": ()}, {"world_sizes": (0,)}, {"checks": ("forwrd",)}, {"checks": ()}])
def test_a_property_of_nothing_is_refused_when_it_is_made(given: Any) -> None:
    with pytest.raises(tpv.CaseError):
        property_test(right, **given)


def test_a_property_of_a_contradiction_is_a_subject_error() -> None:
    with pytest.raises(tpv.SubjectError, match="Expected a placement for every parameter"):
        property_test(bent(placements=None))()
    left()


def test_a_typical_case_is_ordinary_and_accepted() -> None:
    case = typical_case(right, 2)
    assert (case.world_size, case.values, case.layout, case.groups) == (2, "normal", "contiguous", "world")
    with pytest.raises(tpv.CaseError, match="world_size=2 but it refuses all that were drawn"):
        typical_case(bent(rejects=lambda c, world_size: True), 2)
    assert read_case("Case('bent_subjects:right', Sizes(), world_size=1)")[0].name == "bent_subjects:right"
