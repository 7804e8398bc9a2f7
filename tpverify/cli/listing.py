"""``tpverify list``: what there is to verify, what is checked, and what the checks are tried on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tpverify.cli.params import is_verbose, verbose_option
from tpverify.errors import CaseError

if TYPE_CHECKING:
    from tpverify.adapters.libraries import Library


@click.command("list")
@verbose_option
def command() -> None:
    """List the built-in subjects, libraries with adapters, the checks, and the mutants by kind; -v lists every mutant and control."""
    from tpverify.report.text import PLAIN_WIDTH
    from tpverify.verification import builtin_subjects, describe_checks

    subjects = Table("subject", "collectives", "vocabulary", "refuses uneven sizes", box=box.SIMPLE, pad_edge=False)
    for name, subject in builtin_subjects().items():
        cells = ("checked" if subject.communication else "recorded", _mark(subject.vocabulary), _mark(subject.rejects))
        subjects.add_row(name, *cells)
    checks = Table("check", "what must hold", box=box.SIMPLE, pad_edge=False)
    for check, description in describe_checks().items():
        checks.add_row(check, description)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(subjects, _libraries(), checks, *(_every_mutant() if is_verbose() else [_kinds()]))


def _libraries() -> Table:
    """What each adapter verifies here, or the line that installs its library."""
    from tpverify.adapters.libraries import LIBRARIES

    table = Table("library", "version", "adapter", "subjects, or how to install it", box=box.SIMPLE, pad_edge=False)
    for library in LIBRARIES.values():
        state, lines = _state(library)
        table.add_row(library.distribution, library.version or "-", state, "\n".join(lines))
    return table


def _state(library: Library) -> tuple[str, list[str]]:
    """Whether a library's subjects can be verified here; their names, or the line that installs it."""
    if not library.version:
        return "not installed", [library.install]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = [f"{library.name}.{layer}" for layer in library.subjects()]
    except CaseError:
        return "does not import", [library.install]
    return "usable" if library.tried else f"tried with {library.range} only", names


def _kinds() -> Table:
    from tpverify.mutants.catalogue import catalogue

    kinds: dict[str, list[str]] = {}
    for mutant in catalogue().values():
        kinds.setdefault(mutant.kind, []).append(mutant.check)
    table = Table("kind", "mutants", "must be killed by", box=box.SIMPLE, pad_edge=False)
    for kind, killers in kinds.items():
        table.add_row(kind, str(len(killers)), ", ".join(sorted(set(killers))))
    return table


def _every_mutant() -> tuple[Table, Table]:
    from tpverify.mutants.catalogue import catalogue
    from tpverify.mutants.controls import controls

    mutants = Table("mutant", "kind", "subject", "must be killed by", "story", box=box.SIMPLE, pad_edge=False)
    for mutant in catalogue().values():
        killer = "none: equivalent" if mutant.equivalent else mutant.check
        mutants.add_row(mutant.id, mutant.kind, mutant.base, killer, mutant.story)
    unflagged = Table("control", "looks like", "but is right because", box=box.SIMPLE, pad_edge=False)
    for control in controls().values():
        unflagged.add_row(control.id, control.looks_like, control.because)
    return mutants, unflagged


def _mark(value: object) -> str:
    return "yes" if value else "-"
