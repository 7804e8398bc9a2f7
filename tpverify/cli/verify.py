"""``tpverify verify``: subjects one after the other, then one result on stdout and the reports that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from tpverify.cli.app import error, internal_error
from tpverify.cli.exit_codes import exit_code
from tpverify.cli.params import device_option, dtypes_option, is_verbose, reads, seed_option, verbose_option, world_option
from tpverify.cli.progress import ProgressLog
from tpverify.cli.quiet import hush_torch
from tpverify.errors import CaseError, NoDevice, SubjectError
from tpverify.options import did_you_mean, parse_world_sizes
from tpverify.report import NEED_LEDGERS, parse_report, write_report
from tpverify.report.report import Report, SubjectFailure

if TYPE_CHECKING:
    from tpverify.ledger.ledger import Ledger
    from tpverify.result import Result


@dataclass(frozen=True)
class Options:
    """What :func:`tpverify.verify` is given for every subject."""

    world: str
    device: str
    dtypes: tuple[str, ...]
    world_sizes: tuple[int, ...]
    max_examples: int
    seed: int
    checks: tuple[str, ...] | None


@click.command("verify", short_help="Verify subjects; without a name, all built-in ones.")
@click.argument("subjects", nargs=-1, metavar="[SUBJECT]...")
@world_option
@device_option
@dtypes_option
@click.option(
    "--world-sizes",
    default="1,2,3,4",
    callback=reads(parse_world_sizes),
    show_default=True,
    metavar="N,N,...",
    help="TP degrees to draw from.",
)
@click.option("--max-examples", type=click.IntRange(min=1), default=100, show_default=True, help="Cases drawn per subject.")
@seed_option
@click.option("--check", "checks", multiple=True, metavar="ID", help="Only this check (repeatable); see `tpverify list`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")
@click.option(
    "--report",
    "reports",
    callback=reads(parse_report),
    multiple=True,
    metavar="FORMAT=PATH",
    help="Also write text, json, html, trace or flight-recorder (a file a rank, for torchfrtrace).",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@verbose_option
def command(
    subjects: tuple[str, ...],
    world: str,
    device: str,
    dtypes: tuple[str, ...],
    world_sizes: tuple[int, ...],
    max_examples: int,
    seed: int,
    checks: tuple[str, ...],
    as_json: bool,
    reports: tuple[tuple[str, Path], ...],
    quiet: bool,
) -> None:
    """Verify subjects: built-in names or module:attribute; without a name, all built-in subjects.

    The result goes to stdout, progress to stderr.
    """
    from tpverify.verification import builtin_subjects

    _known_checks(checks)
    options = Options(world, device, dtypes, world_sizes, max_examples, seed, checks or None)
    results, failures = _verify_all(subjects or tuple(builtin_subjects()), options, quiet)
    ledgers = _ledgers(results, options) if NEED_LEDGERS.intersection(name for name, _ in reports) else {}
    report = Report(tuple(results), seed, ledgers, tuple(failures))
    _print(report, as_json)
    for name, path in reports:
        _write(name, path, report)
    click.get_current_context().exit(exit_code(report))


def _verify_all(names: Sequence[str], options: Options, quiet: bool) -> tuple[list[Result], list[SubjectFailure]]:
    results: list[Result] = []
    failures: list[SubjectFailure] = []
    with ProgressLog(quiet=quiet) as log:
        for name in names:
            try:
                results.append(_verify_one(name, options, log))
            except NoDevice as problem:
                error(str(problem))
                failures.append(SubjectFailure(name, "unavailable", str(problem)))
                break
            except (SubjectError, CaseError) as problem:
                error(f"{name}: {problem}")
                failures.append(SubjectFailure(name, "usage", str(problem)))
            except KeyboardInterrupt:
                error(f"{name}: interrupted")
                failures.append(SubjectFailure(name, "interrupted", "interrupted"))
                break
            except Exception as problem:
                failures.append(SubjectFailure(name, "internal", internal_error(problem)))
    return results, failures


def _verify_one(name: str, options: Options, log: ProgressLog) -> Result:
    from tpverify import verification

    if not is_verbose():
        hush_torch()
    result = verification.verify(
        verification.load_subject(name),
        world=options.world,
        device=options.device,
        dtypes=options.dtypes,
        world_sizes=options.world_sizes,
        max_examples=options.max_examples,
        seed=options.seed,
        checks=options.checks,
        progress=log.start(name, options.max_examples),
    )
    log.finish(result)
    return result


def _known_checks(checks: tuple[str, ...]) -> None:
    from tpverify.verification import describe_checks

    known = describe_checks()
    for check in checks:
        if check not in known:
            problem = f"Expected one of {', '.join(known)} but got {check!r}{did_you_mean(check, known)}"
            raise click.BadParameter(problem, param_hint="'--check'")


def _ledgers(results: list[Result], options: Options) -> dict[str, Ledger]:
    """By subject, the ledger of its first failing test case, or else of a typical case at the largest world size."""
    from tpverify import verification

    ledgers = {}
    for result in results:
        if result.violations:
            subject, case = verification.read_case(result.violations[0].case)
        else:
            subject = verification.load_subject(result.subject)
            case = verification.typical_case(subject, max(options.world_sizes), options.seed)
        ledgers[result.subject] = verification.run_case(subject, case, world=options.world, device=options.device).parallel.ledger
    return ledgers


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        from tpverify.report import format_report

        click.echo(format_report("json", report), nl=False)
    elif report.results:
        from tpverify.report.text import PLAIN_WIDTH, render

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        console.print(render(report, verbose=is_verbose()), soft_wrap=True)


def _write(name: str, path: Path, report: Report) -> None:
    try:
        write_report(name, path, report)
    except OSError as problem:
        raise CaseError(f"Expected a file that can be written but got {str(path)!r}: {problem.strerror}") from problem
