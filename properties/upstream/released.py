"""How released libraries are tested: what is wrong in them is expected on the versions that have it, and all the rest must hold."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import tpverify as tpv
from tpverify.adapters.libraries import LIBRARIES
from tpverify.case import Case
from tpverify.script.source import script
from tpverify.strategies import cases
from tpverify.verification import read_case

CASES = 100 if settings().max_examples >= 1000 else 15
"""Drawn of each subject's right paths; more in the nightly profile."""

WITHOUT_TPVERIFY = 'import sys\n\nsys.modules["tpverify"] = None\n'
"""In front of a program, lets it and the processes that it starts fail to import tpverify."""


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
    ran = 0

    def holds(case: Case) -> None:
        nonlocal ran
        config = dataclasses.replace(case.config, **right(case.config))
        case = dataclasses.replace(case, config=config, layout=case.layout if layouts else "contiguous")
        assert tpv.check_case(subject, case) == []
        ran += 1

    phases = (Phase.generate, Phase.shrink)
    config = settings(max_examples=CASES, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck))
    hypothesis.seed(0)(config(given(cases(subject, (1, 2, 3, 4)))(holds)))()
    return ran


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
