"""The group of commands: which there are, and how an exception becomes a message and an exit code."""

from __future__ import annotations

import importlib
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

import click

from tpverify.cli.exit_codes import ExitCode
from tpverify.cli.params import is_verbose
from tpverify.errors import CaseError, NoDevice, SubjectError
from tpverify.options import did_you_mean

OWN = Path(__file__).parents[1]
"""Where tpverify lies."""

COMMANDS = {
    "verify": "tpverify.cli.verify",
    "replay": "tpverify.cli.replay",
    "ledger": "tpverify.cli.ledger",
    "mutants": "tpverify.cli.mutants",
    "bench": "tpverify.cli.bench",
    "list": "tpverify.cli.listing",
}
"""Command -> module that holds it as ``command``."""


class Commands(click.Group):
    """Commands by name, imported on demand; no exception reaches the user as a bare traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names; a mistyped name gets a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as problem:
            raise click.UsageError(problem.message.rstrip(".") + did_you_mean(args[0], COMMANDS), ctx) from problem

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; end with the exit code that fits what it raised."""
        try:
            with warnings.catch_warnings():
                # The code under test may call names that newer releases of torch deprecate: not what is checked here.
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, click.ClickException, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            error("interrupted")
            ctx.exit(ExitCode.INTERRUPTED)
        except NoDevice as problem:
            error(str(problem))
            ctx.exit(ExitCode.NOTHING_CHECKED)
        except (SubjectError, CaseError) as problem:
            error(str(problem))
            ctx.exit(ExitCode.USAGE)
        except Exception as problem:
            internal_error(problem)
            ctx.exit(ExitCode.INTERNAL)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tpverify")
def main() -> None:
    """Check tensor-parallel PyTorch code against its single-device reference, on simulated ranks.

    Exit codes: 0 all checks held, 1 a check failed, 2 wrong usage, 3 internal error, 5 nothing was checked, 130 interrupted.
    Of several subjects, the first of 130, 3, 2, 1, 5, 0 counts.
    """


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """On stderr; tpverify's own without the line of code that gave it."""
    if OWN in Path(filename).parents:
        error(f"warning: {message}")
    else:
        click.echo(warnings.formatwarning(message, category, filename, lineno, line), err=True, nl=False)


def error(message: str) -> None:
    """One message on stderr."""
    click.echo(f"tpverify: {message}", err=True)


def internal_error(problem: Exception) -> str:
    """Report an unexpected exception on stderr, in one line, or with its traceback under ``-v``; returns the line."""
    first_line = (str(problem).strip().splitlines() or [""])[0]
    line = f"internal error: {type(problem).__name__}: {first_line}"
    if is_verbose():
        click.echo("".join(traceback.format_exception(problem)), err=True, nl=False)
        error(line)
    else:
        error(f"{line} (-v shows the traceback)")
    return line
