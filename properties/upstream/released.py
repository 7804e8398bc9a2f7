"""How released libraries are tested: what is wrong in them is expected on the versions that have it, and all the rest must hold."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

import tpverify as tpv
from tpverify.adapters.libraries import LIBRARIES
from tpverify.case import Case
from tpverify.errors import CaseError
from tpverify.options import DTYPES
from tpverify.script.source import script
from tpverify.strategies import cases
from tpverify.verification import read_case

NIGHTLY = settings().max_examples >= 1000

CASES = 100 if NIGHTLY else 15
"""Drawn of each subject's right paths; more in the nightly profile."""

SCRIPTS = 20 if NIGHTLY else 3
"""As many of them have their scripts run too."""

WITHOUT_TPVERIFY = 'import sys\n\nsys.modules["tpverify"] = None\n'
"""In front of a program, lets it and the processes that it starts fail to import tpverify."""


Recorder = Callable[[str, object], None]
"""pytest's ``record_property``."""


def subjects_of(library: str) -> dict[str, tpv.Subject]:
    """The library's subjects; where it is not installed the tests of the file are skipped, and the line that installs it is shown."""
    found = LIBRARIES[library]
    if not found.version:
        pytest.skip(f"{found.distribution} is not installed: {found.install}", allow_module_level=True)
    return found.subjects()


def found_on(case: str) -> set[str]:
    """What the checks say of one case, ``check: first line`` each."""
    subject, parsed = read_case(case)
    return {f"{violation.check}: {violation.message}" for violation in tpv.check_case(subject, parsed)}


def assert_found(case: str, check: str, says: str) -> None:
    """The case violates the check, in these words."""
    found = found_on(case)
    assert any(text.startswith(f"{check}: ") and says in text for text in found), found


def assert_holds(subject: tpv.Subject, right: Callable[[Any], Mapping[str, Any]], layouts: bool) -> int:
    """All checks hold for cases whose config is changed to the right paths; how many there were.

    Args:
        right: the config's fields that must differ to keep it off the wrong paths.
        layouts: whether the library takes strided tensors.
    """
    return assert_cases_hold(subject, on_right_path(right, layouts), CASES)


def assert_cases_hold(subject: tpv.Subject, changed: Callable[[Case], Case], examples: int, dtypes: Sequence[str] = DTYPES[:1]) -> int:
    """All checks hold for drawn cases that are kept off what is wrong; how many there were."""

    def holds(case: Case) -> None:
        assert tpv.check_case(subject, case) == [], case

    return for_cases(subject, changed, holds, examples, dtypes)


def counted(record_property: Recorder, ran: int, at_least: int) -> None:
    """Enough cases have held; their number is printed at the end of the run."""
    record_property("upstream-cases", ran)
    assert ran >= at_least


def on_right_path(right: Callable[[Any], Mapping[str, Any]], layouts: bool) -> Callable[[Case], Case]:
    """What keeps a case off what is wrong, by the same arguments."""

    def changed(case: Case) -> Case:
        config = dataclasses.replace(case.config, **right(case.config))
        return dataclasses.replace(case, config=config, layout=case.layout if layouts else "contiguous")

    return changed


def for_cases(
    subject: tpv.Subject,
    changed: Callable[[Case], Case],
    test: Callable[[Case], None],
    examples: int,
    dtypes: Sequence[str] = DTYPES[:1],
) -> int:
    """Run a test on drawn cases, kept off what is wrong; how many there were."""
    ran = 0

    def of_case(case: Case) -> None:
        nonlocal ran
        test(changed(case))
        ran += 1

    phases = (Phase.generate, Phase.shrink)
    config = settings(max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck))
    hypothesis.seed(0)(config(given(cases(subject, (1, 2, 3, 4), dtypes=dtypes))(of_case)))()
    return ran


def assert_script_holds(subject: tpv.Subject, case: Case) -> None:
    """The script of a case finds nothing if simulated ranks run it; cases that are refused, or long, are drawn again."""
    hypothesis.assume(subject.rejects is None or not subject.rejects(case.config, case.world_size))
    space: dict[str, Any] = {"__name__": "script"}
    try:
        exec(compile(script(subject, case, "simulator"), "script", "exec"), space)
    except CaseError as error:
        if "numbers to write down" not in str(error):
            raise
        hypothesis.reject()
    wrong = torch.zeros(case.world_size)
    with subject.context_for(case.config), contextlib.redirect_stdout(io.StringIO()) as printed:
        tpv.simulate(lambda: space["run"](dist.get_rank(), "unused", wrong), case.world_size, rank_local=subject.rank_local)
    assert not wrong.any() and ": expected " in printed.getvalue(), printed.getvalue()


def a_few(names: Iterable[str], *few: str) -> list[str]:
    """These few of the names; all of them in the nightly profile. On real processes a script takes ten seconds or more."""
    every = list(names)
    assert set(few) <= set(every), few
    return every if NIGHTLY else list(few)


def shown_on_gloo(case: str, folder: Path) -> tuple[int, str]:
    """The exit code and the output of the case's script, run where nothing of tpverify can be imported.

    Args:
        folder: where it may lie.
    """
    path = folder / "script.py"
    path.write_text(WITHOUT_TPVERIFY + script(*read_case(case), "simulator"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-I", path], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def assert_shown(case: str, says: str, folder: Path) -> None:
    """The script exits 1, and says so where a number differs or a rank raises."""
    code, printed = shown_on_gloo(case, folder)
    wrong = [line for line in printed.splitlines() if ": expected " not in line or "<-- differs" in line]
    assert code == 1 and any(says in line for line in wrong), printed


def assert_not_shown(case: str, folder: Path) -> None:
    """The script exits 0: numbers have been compared, and all agree."""
    code, printed = shown_on_gloo(case, folder)
    assert code == 0 and ": expected " in printed and "<-- differs" not in printed, printed
