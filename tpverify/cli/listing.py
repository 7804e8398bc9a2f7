"""``tpverify list``: what there is to verify, and what is checked."""

from __future__ import annotations

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tpverify.cli.params import verbose_option


@click.command("list")
@verbose_option
def command() -> None:
    """List the built-in subjects and the checks."""
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
    console.print(subjects, checks)


def _mark(value: object) -> str:
    return "yes" if value else "-"
