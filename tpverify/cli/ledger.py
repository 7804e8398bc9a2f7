"""``tpverify ledger``: the collectives of one case as a table, saved, or beside those of a saved case or of another subject."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from tpverify.cli.app import error
from tpverify.cli.exit_codes import ExitCode
from tpverify.cli.params import is_verbose, seed_option, verbose_option
from tpverify.cli.quiet import hush_torch
from tpverify.config import values_of, with_values
from tpverify.errors import CaseError

if TYPE_CHECKING:
    from tpverify.case import Case
    from tpverify.subjects.subject import Subject

SCHEMA_VERSION = 1


@click.command("ledger", short_help="Show, save or compare a subject's collectives.")
@click.argument("subject_name", metavar="SUBJECT")
@click.argument("other_name", metavar="[OTHER]", required=False)
@click.option("--world-size", type=click.IntRange(min=1), default=2, show_default=True, help="TP degree.")
@seed_option
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the case and its ledger as JSON.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Run the case of a saved ledger again; exit 1 if its collectives are no longer the same.",
)
@verbose_option
def command(subject_name: str, other_name: str | None, world_size: int, seed: int, save: Path | None, against: Path | None) -> None:
    """Show the collectives of one typical case by phase and module, as the lowest rank issued them.

    Elements and bytes are message sizes, summed over the count. Of two subjects both tables are shown, and one that counts by phase and
    kind; OTHER runs with SUBJECT's values of all config fields that it has as well, unless it refuses them.
    """
    if not is_verbose():
        hush_torch()
    if other_name is not None:
        if save or against:
            raise click.UsageError("Expected --save and --against with one subject but got two")
        _beside(subject_name, other_name, world_size, seed)
        return
    from tpverify import verification
    from tpverify.ledger.ledger import Ledger
    from tpverify.report.ledger_text import ledger_difference, ledger_table

    saved = _load(against, subject_name) if against else None
    if saved:
        subject, case = verification.read_case(saved["case"])
    else:
        subject = verification.load_subject(subject_name)
        case = verification.typical_case(subject, world_size, seed)
    run = verification.run_case(subject, case).parallel
    console = _console()
    console.print(repr(case))
    console.print(ledger_table(run.ledger), soft_wrap=False)
    if save:
        _save(save, {"schema_version": SCHEMA_VERSION, "subject": subject_name, "case": repr(case), "ledger": run.ledger.as_dict()})
    difference = ledger_difference(Ledger.from_dict(saved["ledger"]), run.ledger) if saved else ""
    if saved:
        console.print(difference or f"The collectives are those of {against}")
    if run.error:
        error(str(run.error))
    click.get_current_context().exit(ExitCode.VIOLATED if difference or run.error else ExitCode.HELD)


def _beside(subject_name: str, other_name: str, world_size: int, seed: int) -> None:
    from tpverify import verification
    from tpverify.report.ledger_comparison import comparison_table
    from tpverify.report.ledger_text import ledger_table

    subject, other = verification.load_subject(subject_name), verification.load_subject(other_name)
    case = verification.typical_case(subject, world_size, seed)
    likened = _likened(other, verification.typical_case(other, world_size, seed), case.config)
    named = ((subject_name, subject, case), (other_name, other, likened))
    runs = [(name, verification.run_case(which, of_case).parallel) for name, which, of_case in named]
    console = _console()
    for (_, _, of_case), (_, run) in zip(named, runs, strict=True):
        console.print(repr(of_case))
        console.print(ledger_table(run.ledger), soft_wrap=False)
    console.print(comparison_table([(name, run.ledger) for name, run in runs]), soft_wrap=False)
    errors = [f"{name}: {run.error}" for name, run in runs if run.error]
    for problem in errors:
        error(problem)
    click.get_current_context().exit(ExitCode.VIOLATED if errors else ExitCode.HELD)


def _likened(subject: Subject, case: Case, config: Any) -> Case:
    """The case with another config's values of the fields that both have, if the subject computes that."""
    mine, others = values_of(case.config), values_of(config)
    common = {name: value for name, value in others.items() if name in mine}
    likened = dataclasses.replace(case, config=with_values(case.config, common)) if common else case
    refused = subject.rejects is not None and subject.rejects(likened.config, likened.world_size)
    return case if refused else likened


def _console() -> Console:
    from tpverify.report.text import PLAIN_WIDTH

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def _save(path: Path, data: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as problem:
        raise CaseError(f"Expected a file that can be written but got {str(path)!r}: {problem.strerror}") from problem


def _load(path: Path, subject_name: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version, subject = data["schema_version"], data["subject"]
        data["case"], data["ledger"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CaseError(f"Expected a file that `tpverify ledger --save` wrote but got {str(path)!r}: {problem!r}") from problem
    if version != SCHEMA_VERSION:
        raise CaseError(f"Expected a saved ledger of schema_version={SCHEMA_VERSION} but got schema_version={version!r} in {str(path)!r}")
    if subject != subject_name:
        raise CaseError(f"Expected the ledger of {subject_name!r} but got that of {subject!r} in {str(path)!r}")
    loaded: dict[str, Any] = data
    return loaded
