"""Options of the GPU tier, the places that tests run at, the table at the end, and an exit code that is never green without a GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
# Planted bugs and subjects of the CPU tier are imported, here and by rank processes, as its own tests import them.
sys.path.insert(0, str(ROOT / "properties"))

import tpverify as tpv  # noqa: E402
from gpu_suite import artifacts, plan, table  # noqa: E402
from gpu_suite.places import Place, may_share_a_gpu, no_gpu, places  # noqa: E402
from tpverify.case import Case  # noqa: E402
from tpverify.cli.exit_codes import ExitCode  # noqa: E402
from tpverify.processes.devices import SHARED_GPUS  # noqa: E402
from tpverify.violation import Violation, failure_report  # noqa: E402

PROPERTY = "gpu_suite"
"""Name of the user property that holds one row as JSON text, so that xdist and JUnit XML carry it."""
DEVICE_VARIABLE = "TPVERIFY_GPU_DEVICE"
STARTED = time.monotonic()
HERE = pytest.StashKey[list[Place]]()
ROWS = pytest.StashKey[list[table.Row]]()
LATE = f"{plan.DEADLINE_SECONDS} s had passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("gpu_suite", "the GPU tier of tpverify")
    group.addoption(
        "--gpu-device",
        choices=("cuda", "cpu"),
        default=os.environ.get(DEVICE_VARIABLE, "cuda"),
        help=f"cpu = run what needs no GPU, on the CPU; otherwise no GPU means exit code 5 (default: ${DEVICE_VARIABLE}, or cuda)",
    )
    group.addoption("--gpu-tier", choices=("full", "tiny"), default="full", help="how many cases, see gpu_suite/plan.py")
    group.addoption("--gpu-artifacts", type=Path, metavar="DIR", help="write the table, reports, ledgers and Flight Recorder dumps there")


def pytest_configure(config: pytest.Config) -> None:
    """Find out where tests can run."""
    config.addinivalue_line("markers", "row(what): the row of the table that a test counts for, one of plan.COUNTS")
    config.addinivalue_line("markers", "full: left out of the tiny tier")
    config.addinivalue_line("markers", "against_the_simulator: for every other world")
    if may_share_a_gpu():
        os.environ.setdefault(SHARED_GPUS, "1")  # read by NCCL in the rank processes
    torch.set_num_threads(1)
    config.stash[HERE] = places(config.getoption("--gpu-device"))
    config.stash[ROWS] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes a place is run, or counted as not run, at each."""
    if "place" in metafunc.fixturenames:
        only_real = metafunc.definition.get_closest_marker("against_the_simulator")
        here = [place for place in metafunc.config.stash[HERE] if not (only_real and place.world == "simulator")]
        metafunc.parametrize("place", here, ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rows in the plan's order; of the tiny tier, only what belongs to it."""
    order = list(plan.COUNTS)
    mine = [item for item in items if item.get_closest_marker("row")]
    left_out = [item for item in mine if config.getoption("--gpu-tier") == "tiny" and item.get_closest_marker("full")]
    kept = sorted((item for item in mine if item not in left_out), key=lambda item: order.index(_what(item)))
    items[:] = [item for item in items if item not in mine] + kept
    config.hook.pytest_deselected(items=left_out)


class Rows:
    """What one test adds to the table.

    Args:
        what, place, dtype: of its rows.
        folder: of artifacts, or None.
    """

    def __init__(self, item: pytest.Item, place: Place, tier: str, folder: Path | None) -> None:
        self.item = item
        self.place = place
        self.tier = tier
        self.folder = folder

    @property
    def count(self) -> int:
        """How many cases the test draws from each subject."""
        return plan.count(_what(self.item), self.tier)

    def add(self, **numbers: Any) -> None:
        """One row; see :class:`gpu_suite.table.Row`."""
        _add(self.item, self.place, **numbers)

    def verify(self, subject: tpv.Subject, sizes: Sequence[int] | None = None, **options: Any) -> None:
        """Verify a subject at the place, on several ranks and, with one case, on one; fails the test if something is violated.

        Args:
            sizes: the world sizes that it takes; None = those of the place.
            options: more for :func:`tpverify.verify`.
        """
        taken = [size for size in self.place.sizes if sizes is None or size in sizes]
        several, one = [size for size in taken if size > 1], [size for size in taken if size == 1]
        where = {"world": self.place.world, "device": self.place.device}
        results = [
            tpv.verify(subject, world_sizes=some, max_examples=examples, seed=plan.SEED, **where, **options)
            for some, examples in ((several, self.count), (one, 1 if several else self.count))
            if some
        ]
        found = [violation for result in results for violation in result.violations]
        ran = {size for result in results for size in result.world_sizes}
        self.add(sizes=tuple(ran), cases=sum(result.cases_run for result in results), violations=len(found))
        assert all(result.cases_run for result in results), f"nothing of {subject.name} was run"
        self.hold(found)

    def check(self, subject: tpv.Subject, cases: Sequence[Case], **options: Any) -> None:
        """Run cases at the place that must hold.

        Args:
            options: more for :func:`tpverify.check_case`.
        """
        where = {"world": self.place.world, "device": self.place.device}
        found = [violation for case in cases for violation in tpv.check_case(subject, case, **where, **options)]
        self.add(sizes=tuple({case.world_size for case in cases}), cases=len(cases), violations=len(found))
        self.hold(found)

    def hold(self, violations: Sequence[Violation]) -> None:
        """Fail the test, with reports and artifacts, if there are violations."""
        try:
            if violations and self.folder is not None:
                artifacts.save_failure(self.folder, violations[0], self.place)
        finally:  # whatever comes of one more run
            assert not violations, "\n\n".join(failure_report(violation) for violation in violations)

    def need_several(self) -> tuple[int, ...]:
        """The place's world sizes above 1; the test is not run where there are none."""
        if not self.place.several:
            self.not_run("takes more than one rank, and no more fit on this machine")
        return self.place.several

    def need_cuda(self) -> None:
        """The test is not run on the CPU."""
        if self.place.device != "cuda":
            self.not_run("takes CUDA streams")

    def not_run(self, why: str) -> None:
        """Skip the test, and say so in the table."""
        self.add(sizes=self.place.sizes, missing=why)
        pytest.skip(why)


@pytest.fixture
def rows(request: pytest.FixtureRequest, place: Place) -> Rows:
    """The test's rows; skips it where its place cannot be run."""
    found = Rows(request.node, place, request.config.getoption("--gpu-tier"), request.config.getoption("--gpu-artifacts"))
    if place.missing:
        found.not_run(place.missing)
    return found


def _what(item: pytest.Item) -> str:
    marker = item.get_closest_marker("row")
    return str(marker.args[0]) if marker else item.name


def _add(item: pytest.Item, place: Place, **numbers: Any) -> None:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    row = table.Row(_what(item), place.world, place.device, params.get("dtype", "float64"), **numbers)
    item.user_properties.append((PROPERTY, json.dumps(row.as_dict())))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Past the deadline, tests are left out by name, and the session fails."""
    place = item.callspec.params.get("place") if hasattr(item, "callspec") else None
    if place is None or place.missing or item.config.getoption("--gpu-device") != "cuda":
        return
    if time.monotonic() - STARTED > plan.DEADLINE_SECONDS:
        _add(item, place, sizes=place.sizes, missing=LATE)
        pytest.skip(LATE)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails before it has counted anything counts as failed."""
    failed = call.when == "call" and call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
    if failed and PROPERTY not in dict(item.user_properties):
        place = item.callspec.params.get("place") if hasattr(item, "callspec") else None
        if place is not None:
            _add(item, place, sizes=place.sizes, violations=1)
    return (yield)


class Collector:
    """Gathers rows where all reports arrive, xdist's controller included."""

    def __init__(self, rows: list[table.Row]) -> None:
        self.rows = rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each test's properties come with its last report."""
        if report.when == "teardown":
            self.rows += [table.Row.from_dict(json.loads(str(text))) for name, text in report.user_properties if name == PROPERTY]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start gathering."""
    session.config.pluginmanager.register(Collector(session.config.stash[ROWS]), "gpu-suite-rows")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Nothing run, or no GPU where one was asked for, is exit code 5; tests left out for want of time are a failure."""
    config = session.config
    if (
        hasattr(config, "workerinput")
        or config.option.collectonly
        or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        return
    asked_in_vain = config.getoption("--gpu-device") == "cuda" and no_gpu()
    if asked_in_vain or not sum(row.cases for row in config.stash[ROWS]):
        session.exitstatus = ExitCode.NOTHING_CHECKED
    elif any(row.missing == LATE for row in config.stash[ROWS]):
        session.exitstatus = ExitCode.VIOLATED


def pytest_unconfigure(config: pytest.Config) -> None:
    """The table, after everything that pytest has to say."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    rows = config.stash.get(ROWS, [])
    if reporter is None or hasattr(config, "workerinput") or not rows:
        return
    text = table.as_text(rows)
    for line in ["", *text.splitlines()]:
        reporter.write_line(line)
    if config.getoption("--gpu-device") == "cuda" and no_gpu():
        reporter.write_line(f"gpu_suite: {no_gpu()}", red=True)
    folder = config.getoption("--gpu-artifacts")
    if folder is not None:
        artifacts.save_table(folder, rows, text)
