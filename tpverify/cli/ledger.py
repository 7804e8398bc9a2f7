"""``tpverify ledger``: the collectives of one case as a table, saved to a file, or compared with a saved one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tpverify.cli.app import error
from tpverify.cli.exit_codes import ExitCode
from tpverify.cli.params import seed_option, verbose_option
from tpverify.errors import CaseError

SCHEMA_VERSION = 1


@click.command("ledger", short_help="Show, save or compare a subject's collectives.")
@click.argument("subject_name", metavar="SUBJECT")
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
def command(subject_name: str, world_size: int, seed: int, save: Path | None, against: Path | None) -> None:
    """Show the collectives of one typical case by phase and module, as the lowest rank issued them.

    Elements and bytes are message sizes, summed over the count.
    """
    from tpverify import verification
    from tpverify.ledger.ledger import Ledger
    from tpverify.report.ledger_text import ledger_difference, ledger_table
    from tpverify.report.text import PLAIN_WIDTH

    saved = _load(against, subject_name) if against else None
    if saved:
        subject, case = verification.read_case(saved["case"])
    else:
        subject = verification.load_subject(subject_name)
        case = verification.typical_case(subject, world_size, seed)
    run = verification.run_case(subject, case).parallel
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
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
