"""``tpverify bench``: how fast the simulator is beside other ways to run ranks, and how soon planted bugs are found."""

from __future__ import annotations

import json
import os

import click
from rich.console import Console

from tpverify.cli.app import error
from tpverify.cli.quiet import hush_torch


@click.command("bench", short_help="Time the simulator beside other ways to run ranks.")
@click.option("--quick", is_flag=True, help="The feed-forward network on 4 ranks only, short series, and no mutants: a minute or two.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def command(quick: bool, as_json: bool, quiet: bool) -> None:
    """Time one forward and backward of all ranks, run by the simulator and by every other way, side by side.

    Then: the parts of a case, growth with ranks, collectives and features, runs that get stuck, pytest on one and two processes, and the
    cases until each planted bug is found. Takes half an hour of a machine that does nothing else. Nothing is judged: the exit code is 0.
    """
    from tpverify.bench.measurements import QUICK_PLAN, Plan, measure
    from tpverify.bench.tables import render
    from tpverify.report.text import PLAIN_WIDTH

    hush_torch()
    found = measure(QUICK_PLAN if quick else Plan(), os.cpu_count() or 1, (lambda _: None) if quiet else error)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2, sort_keys=True))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(render(found), soft_wrap=True)
