"""``tpverify replay``: one case again, with its failure reports and its ledger."""

from __future__ import annotations

import click
from rich.console import Console

from tpverify.cli.app import error
from tpverify.cli.exit_codes import ExitCode
from tpverify.cli.params import device_option, is_verbose, verbose_option, world_option
from tpverify.cli.quiet import hush_torch
from tpverify.options import CPU


@click.command("replay", short_help="Run one case again, from its text.")
@click.argument("case_text", metavar="CASE")
@world_option
@device_option
@click.option("--script", "as_script", is_flag=True, help="Print a program that shows it on gloo processes, without tpverify.")
@verbose_option
def command(case_text: str, world: str, device: str, as_script: bool) -> None:
    """Run one case again: the text of a case, as a failure report shows it.

    Prints each violation, and the collectives that the case issued. With --script it prints a program instead that needs torch
    and the library under test only, starts gloo processes and exits 1 where their tensors differ from the reference's.
    """
    from tpverify import verification
    from tpverify.report.ledger_text import ledger_table
    from tpverify.report.text import PLAIN_WIDTH
    from tpverify.violation import failure_report

    if not is_verbose():
        hush_torch()
    subject, case = verification.read_case(case_text)
    if as_script:
        if device != CPU or world == "nccl":
            raise click.UsageError("Expected --script without a GPU: the program that it prints runs gloo processes on CPUs")
        from tpverify.script.source import RIGHT_HERE, script

        text = script(subject, case, world)
        click.echo(text, nl=False)
        if RIGHT_HERE in text:
            error(f"{RIGHT_HERE[0].lower()}{RIGHT_HERE[1:-1]}")
        return
    violations = verification.check_case(subject, case, world=world, device=device)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for violation in violations:
        console.print(failure_report(violation) + "\n")
    console.print(ledger_table(verification.run_case(subject, case, world=world, device=device).parallel.ledger))
    console.print(f"{case!r}: {len(violations)} violation{'s' * (len(violations) != 1)}")
    click.get_current_context().exit(ExitCode.VIOLATED if violations else ExitCode.HELD)
