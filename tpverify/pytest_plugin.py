"""pytest plugin: options for property tests, their failure reports without our frames, a summary, and reports.

Imports neither torch nor Hypothesis: it only looks at :mod:`tpverify.verification` once a test has imported it. Results travel from
the test's process as text on ``item.user_properties``, which pytest-xdist and JUnit XML carry.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tpverify.errors import CaseError
from tpverify.options import (
    DEVICE_VARIABLE,
    DEVICES,
    DTYPES_VARIABLE,
    WORLD_SIZES_VARIABLE,
    WORLD_VARIABLE,
    WORLDS,
    parse_dtypes,
    parse_world_sizes,
)
from tpverify.report import LEDGERS_ONLY, parse_report, write_report

if TYPE_CHECKING:
    from collections.abc import Generator

    from tpverify.report.report import Report

PROPERTY = "tpverify"
"""Name of the user property that holds one result as JSON text."""

PLUGIN = "tpverify-session"


class Session:
    """What one pytest process gathers: results by test, and the environment to restore."""

    def __init__(self, reports: list[tuple[str, Path]]) -> None:
        self.reports = reports
        self.environment: dict[str, str | None] = {}
        self.results: dict[str, list[dict[str, Any]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather a test's results; a test that is run again replaces them."""
        if report.when == "call":
            found = [json.loads(str(value)) for name, value in report.user_properties if name == PROPERTY]
            if found:
                self.results[report.nodeid] = found

    def gathered(self) -> list[dict[str, Any]]:
        """All results, by test name, so that xdist's order does not show."""
        return [result for nodeid in sorted(self.results) for result in self.results[nodeid]]

    def export(self, name: str, value: str | None) -> None:
        """Set an environment variable for this session, if there is a value."""
        if value is not None:
            self.environment[name] = os.environ.get(name)
            os.environ[name] = value

    def restore(self) -> None:
        """Put the environment back."""
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("tpverify", "tensor-parallel verification")
    group.addoption("--tpverify-world", choices=WORLDS, help="what executes the ranks of property tests")
    group.addoption("--tpverify-device", choices=DEVICES, help="where ranks and references of property tests compute")
    group.addoption("--tpverify-dtypes", metavar="NAME,...", help="working dtypes that property tests draw from, as in float64,bfloat16")
    group.addoption("--tpverify-world-sizes", metavar="N,N,...", help="TP degrees that property tests draw from, as in 1,2,4")
    group.addoption(
        "--tpverify-report",
        action="append",
        default=[],
        metavar="FORMAT=PATH",
        help="write the results of property tests as text, json or html (repeatable)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options and hand them to property tests through the environment."""
    sizes = config.getoption("--tpverify-world-sizes")
    dtypes = config.getoption("--tpverify-dtypes")
    try:
        reports = [parse_report(text) for text in config.getoption("--tpverify-report")]
        if sizes is not None:
            parse_world_sizes(sizes)
        if dtypes is not None:
            parse_dtypes(dtypes)
    except CaseError as problem:
        raise pytest.UsageError(str(problem)) from problem
    for name, path in reports:
        if name in LEDGERS_ONLY:
            way_out = f"use tpverify verify --report {name}=PATH"
            raise pytest.UsageError(f"Expected text, json or html but got --tpverify-report {name}={path}: {way_out}")
    session = Session(reports)
    session.export(WORLD_SIZES_VARIABLE, sizes)
    session.export(WORLD_VARIABLE, config.getoption("--tpverify-world"))
    session.export(DEVICE_VARIABLE, config.getoption("--tpverify-device"))
    session.export(DTYPES_VARIABLE, dtypes)
    config.pluginmanager.register(session, PLUGIN)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Restore the environment."""
    session = _session(config)
    if session:
        session.restore()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put results on the item, and show a failed property as its failure report alone."""
    verification = sys.modules.get("tpverify.verification")
    if verification is None:
        return (yield)
    for result in verification.pending_results:
        item.user_properties.append((PROPERTY, json.dumps(result, sort_keys=True)))
    verification.pending_results.clear()
    report = yield
    wants_frames = item.config.getoption("fulltrace") or item.config.getoption("tbstyle") == "native"
    if call.excinfo is not None and isinstance(call.excinfo.value, verification.CheckFailed) and not wants_frames:
        report.longrepr = call.excinfo.getrepr(style="value", chain=False)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the reports, once, where all results are."""
    mine = _session(session.config)
    if mine and mine.reports and not hasattr(session.config, "workerinput"):
        report = _report(mine)
        for name, path in mine.reports:
            write_report(name, path, report)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line for all properties, and one for each report."""
    session = _session(config)
    if not session:
        return
    results = session.gathered()
    if results:
        sizes = ", ".join(map(str, sorted({int(size) for result in results for size in result["world_sizes"]})))
        violations = sum(len(result["violations"]) for result in results)
        cases = sum(result["cases_run"] for result in results)
        line = f"tpverify: {len(results)} properties, {cases} cases, world sizes {sizes}; {violations} violations"
        terminalreporter.write_line(line, red=bool(violations), green=not violations)
    for name, path in session.reports:
        terminalreporter.write_line(f"tpverify: {name} report in {path}")


def _session(config: pytest.Config) -> Session | None:
    plugin = config.pluginmanager.get_plugin(PLUGIN)
    return plugin if isinstance(plugin, Session) else None


def _report(session: Session) -> Report:
    from tpverify.report.report import Report, result_from_dict

    return Report(tuple(result_from_dict(result) for result in session.gathered()))
