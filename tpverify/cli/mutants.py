"""``tpverify mutants``: the kill matrix of the catalogue, or which faults of a subject's own collectives its checks notice."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click
from rich.console import Console, RenderableType

from tpverify.adapters.libraries import library_of
from tpverify.cli.app import error
from tpverify.cli.exit_codes import ExitCode
from tpverify.cli.params import is_verbose, seed_option, verbose_option
from tpverify.cli.progress import ProgressLog
from tpverify.cli.quiet import hush_torch
from tpverify.errors import CaseError
from tpverify.options import did_you_mean

if TYPE_CHECKING:
    from tpverify.mutants.adequacy_result import AdequacyResult
    from tpverify.mutants.outcome import Campaign

CORES = os.cpu_count() or 1

ASCII = str.maketrans("●○✗", "*ox")
"""For terminals that know no more."""

OWN_EXAMPLES = 24
"""Cases drawn of a subject whose own collectives are made to fail: each is run once for every fault."""


@click.command("mutants", short_help="Plant bugs: is each killed by the check that must kill it?")
@click.option("-k", "text", default="", metavar="KIND", help="Only mutants whose kind or id contains this text.")
@click.option(
    "--subject", "name", default="", metavar="SUBJECT", help="Only mutants of a built-in subject; or module:attribute, library.layer."
)
@click.option("--jobs", type=click.IntRange(min=1), default=CORES, show_default="all cores", help="Processes.")
@click.option("--max-examples", type=click.IntRange(min=1), help="Cases drawn per mutant at most (120), or of module:attribute (24).")
@seed_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="The score, and what is not as it should be; no progress on stderr.")
@verbose_option
def command(text: str, name: str, jobs: int, max_examples: int | None, seed: int, as_json: bool, quiet: bool) -> None:
    """Plant the catalogue's bugs one by one: each must be killed by its named check, and no correct code may be flagged.

    Without -k and --subject all controls and built-in subjects are verified as well. -v tells each mutant's story and shrunk case.

    With --subject module:attribute, or library.layer, the bugs are not the catalogue's: each collective that this subject issues is
    made to fail in each way, and the faults that its checks do not notice are listed.
    """
    if ":" in name or library_of(name) is not None:
        if text:
            raise click.UsageError(f"Expected -k with the catalogue's mutants only but got --subject {name} as well")
        code = _adequacy(name, seed, max_examples, as_json, quiet)
    else:
        code = _campaign(text, name, jobs, seed, max_examples, as_json, quiet)
    click.get_current_context().exit(code)


def _campaign(text: str, name: str, jobs: int, seed: int, max_examples: int | None, as_json: bool, quiet: bool) -> ExitCode:
    from tpverify.mutants import campaign, matrix
    from tpverify.mutants.fate import MAX_EXAMPLES

    if name:
        _known_subject(name)
    mutants = campaign.selected(text, name)
    if not mutants:
        error(f"no mutant of {name or 'any subject'} matches {text!r}; see: tpverify list -v")
        return ExitCode.NOTHING_CHECKED
    whole = not (text or name)
    if not quiet:
        error(f"{len(mutants)} mutants, {jobs} process{'es' * (jobs > 1)}")
    with ProgressLog(quiet=quiet) as log:
        show = log.start("mutants", len(mutants))
        done = campaign.run(mutants, seed=seed, max_examples=max_examples or MAX_EXAMPLES, jobs=jobs, whole=whole, progress=show)
    if as_json:
        click.echo(json.dumps(done.as_dict(), indent=2, sort_keys=True))
    else:
        _print(matrix.render(done, quiet=quiet, verbose=is_verbose()))
    if done.interrupted:
        error(f"interrupted after {len(done.fates)} of {len(mutants)} mutants")
    for trouble in done.troubles:
        if is_verbose():
            click.echo(trouble.traceback, err=True, nl=False)
        error(f"internal error: {trouble.id}: {trouble.message}{'' if is_verbose() else ' (-v shows the traceback)'}")
    return campaign_code(done)


def campaign_code(campaign: Campaign) -> ExitCode:
    """The exit code of a campaign."""
    if campaign.interrupted:
        return ExitCode.INTERRUPTED
    if campaign.troubles:
        return ExitCode.INTERNAL
    return ExitCode.HELD if campaign.passed else ExitCode.VIOLATED


def _adequacy(name: str, seed: int, max_examples: int | None, as_json: bool, quiet: bool) -> ExitCode:
    from tpverify.mutants.adequacy import adequacy
    from tpverify.mutants.adequacy_text import adequacy_line, render_adequacy, write_adequacy_json
    from tpverify.verification import load_subject

    if not is_verbose():
        hush_torch()
    subject = load_subject(name)
    with ProgressLog(quiet=quiet) as log:
        result = adequacy(subject, seed=seed, max_examples=max_examples or OWN_EXAMPLES, progress=log.start(name, 0))
    if as_json:
        click.echo(write_adequacy_json(result), nl=False)
    else:
        _print(adequacy_line(result) if quiet else render_adequacy(result, verbose=is_verbose()))
    return adequacy_code(result)


def adequacy_code(result: AdequacyResult) -> ExitCode:
    """The exit code of an adequacy run; a subject that never communicates has no faults to notice."""
    if result.passed:
        return ExitCode.HELD
    return ExitCode.VIOLATED if result.holes or result.failing else ExitCode.NOTHING_CHECKED


def _known_subject(name: str) -> None:
    from tpverify.verification import builtin_subjects

    known = builtin_subjects()
    if name not in known:
        raise CaseError(f"Expected a built-in subject or module:attribute but got {name!r}{did_you_mean(name, known)}")


def _print(shown: RenderableType) -> None:
    from tpverify.report.text import PLAIN_WIDTH

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if console.options.ascii_only:  # rich draws its boxes accordingly, but leaves text as it is
        with console.capture() as captured:
            console.print(shown, soft_wrap=True)
        click.echo(captured.get().translate(ASCII).encode("ascii", "replace").decode(), nl=False)
        return
    console.print(shown, soft_wrap=True)
