"""The public entry points: verify a subject over generated cases, check one case, make a pytest property."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tpverify import options
from tpverify.case import Case
from tpverify.checks.catalogue import describe_checks
from tpverify.config import values_of
from tpverify.errors import CaseError
from tpverify.exploration import Explorer
from tpverify.lookup import addressed, builtin_subjects, load_subject, read_case
from tpverify.result import Result
from tpverify.run import Comparison
from tpverify.runner import CASE_TIMEOUT, run_both
from tpverify.session import Session, world_named
from tpverify.strategies import ALL_WORLD_SIZES, DEFAULT_WORLD_SIZES, cases
from tpverify.subjects.subject import Subject
from tpverify.violation import Violation, failure_report

__all__ = [
    "CheckFailed",
    "builtin_subjects",
    "check_case",
    "describe_checks",
    "load_subject",
    "property_test",
    "read_case",
    "record_result",
    "run_case",
    "typical_case",
    "verify",
]

pending_results: list[dict[str, Any]] = []
"""Results of property tests that nobody has collected yet; the pytest plugin takes them."""


class CheckFailed(AssertionError):
    """Raised by property tests; the message is the failure report."""


def verify(
    subject: Subject,
    *,
    world_sizes: Sequence[int] = DEFAULT_WORLD_SIZES,
    max_examples: int = 100,
    seed: int | None = None,
    world: str = "simulator",
    checks: Collection[str] | None = None,
    timeout: float = CASE_TIMEOUT,
    progress: Callable[[int, int], None] | None = None,
    device: str = options.CPU,
    dtypes: Sequence[str] = options.DTYPES[:1],
) -> Result:
    """Verify a subject over generated cases; a failed check is a violation in the result, never an exception.

    After a failure some more cases are drawn, then every different failure (check and tensor) is shrunk by itself.

    Args:
        world_sizes: TP degrees to draw from.
        max_examples: number of cases to draw; shrinking adds more.
        seed: decides which cases are drawn; None = 0.
        world: what executes ranks.
        checks: ids of the checks to apply; None = all.
        timeout: seconds for one case.
        progress: called with (cases done, cases to do).
        device: where the reference and the ranks compute, ``cpu`` or ``cuda``; simulated ranks share one GPU.
        dtypes: working dtypes to draw from: ``float64``, ``float32``, ``bfloat16``, ``float16``.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
        CaseError: an argument is out of range.
        NoDevice: there is no GPU for ``device`` or ``world``.
    """
    if isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 0:
        raise CaseError(f"Expected max_examples to be at least 0 but got max_examples={max_examples!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise CaseError(f"Expected seed to be None or an integer of at least 0 but got seed={seed!r}")
    started = time.monotonic()
    session = Session(addressed(subject), checks, world, timeout, device)
    explorer = Explorer(session, world_sizes, max_examples, 0 if seed is None else seed, dtypes)
    shown = explorer.explore(progress) if max_examples else {}
    violations = explorer.explained(explorer.shrink_all(shown))
    return session.result(violations, time.monotonic() - started)


def run_case(
    subject: Subject, case: Case, timeout: float = CASE_TIMEOUT, world: str = options.WORLDS[0], device: str = options.CPU
) -> Comparison:
    """Run one case both ways; of two TP groups, the first.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
        CaseError: the world cannot run it.
    """
    executor, where = world_named(world, device)
    return run_both(subject, case, timeout, world=executor, device=where)[0]


def check_case(
    subject: Subject,
    case: Case,
    world: str = options.WORLDS[0],
    checks: Collection[str] | None = None,
    device: str = options.CPU,
) -> list[Violation]:
    """Run one case and return its violations.

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
        CaseError: an argument is out of range.
    """
    session = Session(addressed(subject), checks, world, device=device)
    return list(session.explained(session.run(case)))


def typical_case(subject: Subject, world_size: int, seed: int = 0) -> Case:
    """An ordinary case of a given TP degree, for looking at its ledger.

    Raises:
        CaseError: the subject has no case of that world size that it accepts.
    """
    found: list[Case] = []

    def collect(case: Case) -> None:
        refused = subject.rejects is not None and subject.rejects(case.config, case.world_size)
        plain = case.groups == "world" and case.layout == "contiguous" and case.values == "normal" and case.calls == "once"
        if plain and not refused:
            found.append(case)

    config = settings(max_examples=100, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=list(HealthCheck))
    hypothesis.seed(seed)(config(given(cases(subject, (world_size,)))(collect)))()
    if not found:
        raise CaseError(f"Expected {subject.name} to accept a case of world_size={world_size} but it refuses all that were drawn")
    return max(found, key=lambda case: (-_collectives(subject, case), -_options_changed(case.config), _total_size(case.config), repr(case)))


def _collectives(subject: Subject, case: Case) -> float:
    """How many collectives the subject declares: options that need more, or for which it declares nothing, are not what is typical."""
    declared = subject.communication(case.config, case.world_size) if subject.communication else ()
    return math.inf if declared is None else sum(collective.count for collective in declared)


def _options_changed(config: Any) -> int:
    """How many switches and choices differ from their default."""
    return sum(
        getattr(config, field.name) != field.default for field in dataclasses.fields(config) if isinstance(field.default, (bool, str))
    )


def _total_size(config: Any) -> int:
    """The sum of a config's sizes."""
    return sum(number for number in values_of(config).values() if isinstance(number, int) and not isinstance(number, bool))


def property_test(
    subject: Subject,
    *,
    world_sizes: Sequence[int] | None = None,
    checks: Collection[str] | None = None,
    dtypes: Sequence[str] | None = None,
) -> Callable[[], None]:
    """A pytest test, run by Hypothesis under the active profile: for every case of the subject, all checks hold.

    What executes the ranks, and where, is chosen by ``--tpverify-world`` and ``--tpverify-device``.

    Args:
        world_sizes: TP degrees to draw from; None = those of ``--tpverify-world-sizes``, or 1, 2, 3, 4, 5, 6 and 8.
        checks: ids of the checks to apply; None = all.
        dtypes: working dtypes to draw from; None = those of ``--tpverify-dtypes``, or ``float64``.
    """
    if dtypes is None:
        dtypes = options.parse_dtypes(os.environ.get(options.DTYPES_VARIABLE, options.DTYPES[0]))
    chosen = os.environ.get(options.WORLD_SIZES_VARIABLE)
    allowed = world_sizes if world_sizes is not None else (options.parse_world_sizes(chosen) if chosen else ALL_WORLD_SIZES)
    world = os.environ.get(options.WORLD_VARIABLE, options.WORLDS[0])
    session = Session(addressed(subject), checks, world, device=os.environ.get(options.DEVICE_VARIABLE, options.CPU))

    def holds(case: Case) -> None:
        __tracebackhide__ = True
        violations = session.run(case)
        if violations:
            raise CheckFailed(_report(violations))

    # The first operation of a process takes seconds, so no deadline fits; the report explains, so Hypothesis need not trace lines.
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
    unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
    most_ranks = None if session.world is None else session.world.most_ranks
    driven = unhurried(given(cases(session.subject, allowed, most_ranks=most_ranks, dtypes=dtypes))(holds))

    def test() -> None:
        __tracebackhide__ = True
        started = time.monotonic()
        failed: tuple[Violation, ...] = ()
        try:
            driven()
        except CheckFailed as failure:
            failed = session.explained(session.last)
            failure.args = (_report(failed),)
            raise
        finally:
            record_result(session.result(failed, time.monotonic() - started).as_dict())

    test.__name__ = f"test_{subject.name.replace(':', '_').replace('.', '_')}"
    test.__doc__ = f"All checks hold for {subject.name}."
    return test


def _report(violations: Sequence[Violation]) -> str:
    return "\n\n".join(failure_report(violation) for violation in violations)


def record_result(result: dict[str, Any]) -> None:
    """Leave a property test's result for the pytest plugin."""
    pending_results.append(result)
