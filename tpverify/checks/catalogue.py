"""All checks by id, in the order in which they are reported."""

from __future__ import annotations

from collections.abc import Collection

from tpverify.checks.communication import buffers, communication
from tpverify.checks.contribution import contribution
from tpverify.checks.equivalence import forward, input_gradient, parameter_gradient
from tpverify.checks.execution import execution, rejection
from tpverify.checks.finding import Check, Finding
from tpverify.checks.margin import measuring
from tpverify.checks.replication import replication
from tpverify.checks.tied import tied
from tpverify.checks.vocabulary import vocabulary
from tpverify.errors import CaseError
from tpverify.run import Comparison

CHECKS: dict[str, Check] = {
    "execution": execution,
    "rejection": rejection,
    "forward": forward,
    "input-gradient": input_gradient,
    "parameter-gradient": parameter_gradient,
    "replication": replication,
    "communication": communication,
    "buffers": buffers,
    "vocabulary": vocabulary,
    "tied": tied,
    "contribution": contribution,
}

NUMERIC = ("forward", "input-gradient", "parameter-gradient", "vocabulary", "tied")
"""Checks that hold differences against a tolerance."""

COMPARING = (*NUMERIC, "replication")
"""Checks that hold values against values: what they find shows in numbers."""


def describe_checks() -> dict[str, str]:
    """One line per check."""
    return {name: (check.__doc__ or "").strip().splitlines()[0] for name, check in CHECKS.items()}


def selected(names: Collection[str] | None) -> dict[str, Check]:
    """The checks of the given ids; None = all.

    Raises:
        CaseError: an unknown id.
    """
    if names is None:
        return dict(CHECKS)
    if isinstance(names, str) or not names:
        raise CaseError(f"Expected one or more checks, as in checks=('forward',), but got checks={names!r}")
    for name in names:
        if name not in CHECKS:
            raise CaseError(f"Expected one of {', '.join(CHECKS)} but got check={name!r}")
    return {name: check for name, check in CHECKS.items() if name in names}


def apply(checks: dict[str, Check], comparison: Comparison, largest: dict[str, float] | None = None) -> dict[str, list[Finding] | None]:
    """Every check's findings; None where it had nothing to look at.

    Args:
        largest: by check, raised to the largest error of any tensor relative to its bound; None = nobody asks.
    """
    if largest is None:
        return {name: check(comparison) for name, check in checks.items()}
    findings = {}
    for name, check in checks.items():
        ratios: list[float] = []
        with measuring(ratios):
            findings[name] = check(comparison)
        if ratios:
            largest[name] = max(largest.get(name, 0.0), *ratios)
    return findings
