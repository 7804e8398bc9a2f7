"""Hypothesis profiles of the CPU tier: dev, ci and nightly, chosen by HYPOTHESIS_PROFILE or by CI."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from typing import Any

import torch
from hypothesis import HealthCheck, settings

from tpverify.adapters.libraries import LIBRARIES

# A case runs several simulated ranks: it is slow by nature, and slower on a busy machine. Neither says that anything is wrong.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large], "print_blob": True}

settings.register_profile("dev", max_examples=30, **COMMON)
settings.register_profile("ci", max_examples=50, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# Tensors are tiny: more threads only compete with pytest-xdist's processes.
torch.set_num_threads(1)

# A shell has its background jobs ignore interrupts, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What did not run and why, and what was compared with a real backend, from whichever process did it."""
    for reason in sorted({str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", []) if report.longrepr}):
        terminalreporter.write_line(f"not run: {reason.removeprefix('Skipped: ')}")
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, []) if report.when == "call"]
    properties = [item for report in reports for item in report.user_properties]
    for text in sorted(value for name, value in properties if name == "conformance"):
        terminalreporter.write_line(f"conformance: {text}")
    cases = [value for name, value in properties if name == "conformance-cases"]
    if cases:
        terminalreporter.write_line(f"conformance: {sum(cases)} cases of subjects in {len(cases)} tests run as on gloo")
    outcomes = [report for outcome in ("passed", "failed", "skipped") for report in terminalreporter.stats.get(outcome, [])]
    held = {report.nodeid: value for report in reports for name, value in report.user_properties if name == "upstream-cases"}
    for line in released_libraries({report.nodeid for report in outcomes}, held):
        terminalreporter.write_line(line)


def released_libraries(nodes: Collection[str], held: Mapping[str, int]) -> list[str]:
    """Which released libraries were verified, in which version and by how many tests, and which were not.

    Args:
        nodes: ids of the tests that ran, and of the files that were skipped as a whole.
        held: by id of a test, how many drawn cases have held in it.
    """
    if not any("upstream/test_" in node.partition("::")[0] for node in nodes):
        return []
    lines = []
    for library in LIBRARIES.values():
        own = f"upstream/test_{library.name}.py::test_"
        tests, cases = sum(own in node for node in nodes), sum(count for node, count in held.items() if own in node)
        verified = f"{library.version}: {tests} tests, {cases} cases held"
        absent = f"is not installed, nothing of it was verified: {library.install}"
        lines.append(f"upstream: {library.distribution} {verified if library.version else absent}")
    missing = sum(not library.version for library in LIBRARIES.values())
    return [*lines, f"upstream: {missing} of {len(LIBRARIES)} libraries missing"]
