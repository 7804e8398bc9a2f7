"""Planted bugs and controls by name, as the text of a case has them: ``tpverify.mutants:row_averaged``; imported when asked for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    unknown = AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.startswith("_") or find_spec(f"{__name__}.{name}"):  # a module of this folder that is not imported yet
        raise unknown
    from tpverify.mutants.catalogue import catalogue
    from tpverify.mutants.controls import controls

    subjects = [*(mutant.subject for mutant in catalogue().values()), *(control.subject for control in controls().values())]
    for subject in subjects:
        if subject.name == f"{__name__}:{name}":
            return subject
    raise unknown
