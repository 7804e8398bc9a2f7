"""Options that several commands share, and how their text is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tpverify.errors import CaseError
from tpverify.options import CPU, DEVICES, DTYPES, WORLDS, parse_dtypes

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
VERBOSE = "tpverify.verbose"


def reads(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, Any], T | tuple[T, ...]]:
    """An option's callback that parses its text, or each of its texts; a CaseError becomes a usage error."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> T | tuple[T, ...]:
        try:
            return tuple(parse(text) for text in value) if param.multiple else parse(value)
        except CaseError as problem:
            raise click.BadParameter(str(problem), ctx, param) from problem

    return callback


def world_option(function: F) -> F:
    """``--world``: what executes the ranks."""
    option = click.option("--world", type=click.Choice(WORLDS), default=WORLDS[0], show_default=True, help="What executes the ranks.")
    return option(function)


def device_option(function: F) -> F:
    """``--device``: where the ranks compute."""
    text = "Where ranks and reference compute; simulated ranks share one GPU. NCCL implies cuda."
    return click.option("--device", type=click.Choice(DEVICES), default=CPU, show_default=True, help=text)(function)


def dtypes_option(function: F) -> F:
    """``--dtypes``: working dtypes to draw from."""
    text = f"Working dtypes to draw from: {', '.join(DTYPES)}."
    option = click.option("--dtypes", default=DTYPES[0], callback=reads(parse_dtypes), show_default=True, metavar="NAME,...", help=text)
    return option(function)


def seed_option(function: F) -> F:
    """``--seed``: equal seeds give equal cases."""
    return click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal cases.")(function)


def verbose_option(function: F) -> F:
    """``-v``, kept with the context so that whoever reports an exception knows."""
    option = click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=_keep, help="More detail; tracebacks of errors.")
    return option(function)


def is_verbose() -> bool:
    """Whether the running command was given ``-v``."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(VERBOSE))


def _keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[VERBOSE] = value
