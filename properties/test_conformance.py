"""The simulator is right: generated programs of collectives and all built-in subjects, on the simulator and on gloo.

``HYPOTHESIS_PROFILE=nightly python -m pytest properties/test_conformance.py`` compares more than ten thousand programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from tpverify.conformance import certify
from tpverify.conformance.calls import CALLS
from tpverify.conformance.certify import Certifier, behaviour, outcome
from tpverify.conformance.comparison import Outcome
from tpverify.conformance.differences import DIFFERENCES, Difference, without_differences
from tpverify.conformance.program import Program, Step
from tpverify.conformance.programs import programs
from tpverify.conformance.runs import unequal_runs
from tpverify.errors import CollectiveRefused, RankError, RankTimeout
from tpverify.ledger.record import Record
from tpverify.lookup import builtin_subjects
from tpverify.processes.world import process_world
from tpverify.simulator import collectives, endpoint
from tpverify.strategies import cases

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]

NIGHTLY = settings().max_examples >= 1000
PROGRAMS = 4000 if NIGHTLY else 30
"""For each world size; not all of them are different."""
CASES = 20 if NIGHTLY else 1
"""For each subject and world size."""
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def certifier() -> Iterator[Certifier]:
    """One set of processes for this module."""
    certifier = Certifier("gloo")
    yield certifier
    certifier.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_programs_do_the_same_as_on_gloo(certifier: Certifier, world_size: int, record_property: Callable[[str, object], None]) -> None:
    before = certifier.count.programs

    @settings(max_examples=PROGRAMS, **QUIET)  # type: ignore[arg-type]
    @given(programs((world_size,)))
    def agree(program: Program) -> None:
        differences = certifier.differences(program)
        assert differences == [], f"{program!r}\n" + "\n".join(differences)

    agree()
    compared = certifier.count.programs - before
    record_property("conformance", f"world size {world_size}: {compared} programs of collectives agree with gloo")
    assert compared > 0.5 * PROGRAMS  # some are drawn twice
    assert certifier.count.hung <= 1 + certifier.count.programs / 500
    if world_size == 4:
        record_property("conformance", certifier.count.summary())
        assert not NIGHTLY or certifier.count.programs >= 10_000


@pytest.mark.parametrize("call", CALLS)
def test_every_call_does_the_same_as_on_gloo(certifier: Certifier, call: str) -> None:
    steps = (Step(call, root=1, shape=(3, 2)), Step(call, 1, wait_after=None), Step("all_reduce", 2))
    program = Program(3, steps, groups=((0, 2), (1, 2)), values="normal")
    assert certifier.differences(program) == []
    # torch's nn.all_gather takes group ranks for global ones in backward, and is refused by all worlds.
    assert outcome(without_differences(program, "gloo")[0]).error is None or call == "nn.all_gather"


REFUSED = (
    Step("all_reduce", op="BAND"),
    Step("reduce_scatter_tensor", dtype="complex64", op="PRODUCT"),
    Step("all_gather", dtype="int16"),
    Step("broadcast", fault="root"),
    Step("reduce", fault="root"),
    Step("gather", dtype="complex64"),
    Step("functional.all_to_all_single", dtype="complex64"),
    Step("functional.all_gather_into_tensor_coalesced", dtype="complex64"),
    Step("all_gather", fault="list length"),
    Step("all_to_all_single", splits=(1,), fault="splits"),
    Step("all_to_all_single", group=1, fault="output size"),
)
"""What the simulator once computed, crashed on, or refused with an exception of another class."""


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: f"{step.call}-{step.fault or step.dtype}")
def test_what_backends_refuse_is_refused_likewise(certifier: Certifier, step: Step) -> None:
    program = Program(2, (step,), groups=((0,),))
    error = outcome(program).error
    assert isinstance(error, RankError) and isinstance(error.exception, CollectiveRefused)
    assert isinstance(error.exception, ValueError) and isinstance(error.exception, RuntimeError)
    assert certifier.differences(program) == []


def test_of_two_faults_on_different_ranks_either_may_end_the_run(certifier: Certifier) -> None:
    refused = Step("all_reduce", group=1, op="BAND")
    program = Program(3, (refused, Step("all_reduce", fault="own shape")), groups=((0,),))
    assert all(certifier.differences(program) == [] for _ in range(5))
    mismatch = outcome(replace(program, steps=program.steps[1:]))
    assert certify._other_fault(program, outcome(program), mismatch)
    assert not certify._other_fault(program, outcome(program), Outcome([], None, None))
    assert not certify._other_fault(replace(program, steps=(refused,)), outcome(program), mismatch)
    alone, all_of_them = Step("nn.gather", group=1), Step("all_gather", fault="output size")
    program = Program(3, (alone, all_of_them), groups=((1,),))
    assert certifier.differences(program) == []
    assert certify._other_fault(program, outcome(program), outcome(replace(program, steps=(alone,))))


def test_a_group_of_others_that_is_used_again_is_that_group(certifier: Certifier) -> None:
    for members in ((2, 0), (2,), (2, 0)):
        for root in range(len(members)):
            program = Program(3, (Step("broadcast", group=1, root=root, fault="outsiders"),), groups=(members,))
            assert certifier.differences(program) == []


def test_products_may_lose_what_lies_below_the_smallest_normal_number(certifier: Certifier) -> None:
    program = Program(3, (Step("all_reduce_coalesced", shape=(1031,), dtype="float16", op="PRODUCT"),), values="normal")
    assert certifier.differences(program) == []
    limits = torch.finfo(torch.float16)
    label, allowed = next(iter(certify.slack(program)[0].items()))
    magnitude = outcome(replace(program, values="magnitudes")).outputs[0][label].double()
    lost = allowed - 3 * limits.eps * magnitude
    assert bool((lost >= 3 * limits.tiny * limits.eps).all())
    assert bool((lost < 1e-4).all())
    sums = replace(program, steps=(replace(program.steps[0], op="SUM"),))
    magnitude = outcome(replace(sums, values="magnitudes")).outputs[0][label].double()
    assert torch.equal(certify.slack(sums)[0][label], 3 * limits.eps * magnitude)


def test_what_only_moves_data_or_picks_numbers_is_exact() -> None:
    for call, op, exact in (("all_gather", "SUM", True), ("all_reduce", "MAX", True), ("all_reduce", "SUM", False), ("ring", "SUM", True)):
        program = Program(2, (Step(call, shape=(5,), op=op),), values="normal")
        assert all(bool((slack == 0).all()) == exact for slack in certify.slack(program)[0].values()), call
    floats = Program(2, (Step("ring", shape=(3,), dtype="float8_e4m3fn"), Step("all_reduce", shape=(7,))), values="normal")
    assert len(certify.slack(floats)) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_a_backend_that_hangs_is_asked_again_once(certifier: Certifier, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, hung = [times], certifier.count.hung

    def hanging(program: Program, world: Any = None) -> Outcome:
        if world is None or not left[0]:
            return outcome(program, world)
        left[0] -= 1
        return Outcome([], RankTimeout("Expected the run to end", (0, 1)), None)

    monkeypatch.setattr(certify, "outcome", hanging)
    differences = certifier.differences(Program(2, (Step("all_reduce"),)))
    assert bool(differences) == (times > 1)
    assert certifier.count.hung == hung + 1
    certifier.count.hung = hung


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.name)
def test_every_listed_difference_is_there(certifier: Certifier, difference: Difference) -> None:
    for backend in difference.backends:
        assert without_differences(difference.example, backend) == (replace(difference.example, steps=()), [difference.name])
    assert behaviour(difference.example, certifier.bare) == (difference.ours, difference.theirs)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", builtin_subjects())
def test_a_subjects_run_is_that_on_gloo(name: str, world_size: int, record_property: Callable[[str, object], None]) -> None:
    subject = builtin_subjects()[name]
    compared = set()

    @settings(max_examples=CASES, **QUIET)  # type: ignore[arg-type]
    @given(cases(subject, (world_size,), most_ranks=4))
    def agree(case: Any) -> None:
        differences = unequal_runs(subject, case, process_world("gloo"))
        assert differences == [], f"{case!r}\n" + "\n".join(differences)
        compared.add(repr(case))

    agree()
    assert compared
    record_property("conformance-cases", len(compared))


def _minimum_as_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce = collectives.reduce_tensors
    monkeypatch.setattr(collectives, "reduce_tensors", lambda tensors, op, order="rank": reduce(tensors, op.replace("MIN", "MAX"), order))


def _gathered_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(inputs: Any) -> list[list[Tensor]]:
        return [[tensor for column in zip(*inputs, strict=True) for tensor in reversed(column)] for _ in inputs]

    monkeypatch.setattr(collectives, "all_gather", all_gather)


def _root_misrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def misrecorded(**fields: Any) -> Record:
        return Record(**{**fields, "root": 0 if fields["kind"] == "reduce" else fields["root"]})

    monkeypatch.setattr(endpoint, "Record", misrecorded)


def _anything_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpverify.simulator.process_group.check_reducible", lambda dtype, op: None)


@pytest.mark.parametrize(
    ("bend", "call"),
    [
        (_minimum_as_maximum, "all_reduce"),
        (_gathered_backwards, "all_gather"),
        (_root_misrecorded, "reduce"),
        (_anything_goes, "all_reduce"),
    ],
)
def test_a_bent_simulator_is_found_on_the_smallest_program(
    certifier: Certifier, monkeypatch: pytest.MonkeyPatch, bend: Callable[[pytest.MonkeyPatch], None], call: str
) -> None:
    search = settings(max_examples=400, database=None, derandomize=True, phases=(Phase.generate, Phase.shrink), **QUIET)  # type: ignore[arg-type]
    drawn = programs((2,), calls=("barrier", call), most_steps=2)
    bend(monkeypatch)
    smallest = hypothesis.find(drawn, lambda program: bool(certifier.differences(program)), settings=search)
    assert [step.call for step in smallest.steps] == [call]
    assert smallest.groups == () and smallest.steps[0].shape == (2,) and smallest.steps[0].wait_after is None
    monkeypatch.undo()
    assert certifier.differences(smallest) == []
