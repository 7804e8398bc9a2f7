"""The kill matrix for people: mutants by kind against checks, then all that is not as it should be, and the score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpverify.checks.catalogue import CHECKS
from tpverify.mutants.fate import Fate
from tpverify.mutants.margins import LEAST
from tpverify.mutants.outcome import NAMED, Campaign

HIT, ALSO, MISSED = "●", "○", "✗"
"""The named check fired; another one fired as well; the named check did not fire."""

PARTS = ("layer", "ranks", "pattern")
MOST_WEAK = 5
"""How many of the mutants killed least clearly are listed."""

SHORT = 4
"""Letters of a check's id in the head of its column."""


def render(campaign: Campaign, *, quiet: bool = False, verbose: bool = False) -> RenderableType:
    """The campaign for a rich console.

    Args:
        quiet: the score and what is wrong only.
        verbose: also every mutant's story and shrunk case.
    """
    parts: list[RenderableType] = []
    if not quiet:
        parts += [_matrix(campaign), Text(_legend() + "\n")]
    if verbose:
        parts.append(Text("\n".join(_stories(campaign)) + "\n"))
    if not quiet and campaign.margins:
        parts += [_margins(campaign), *_section("Killed least clearly", _weakest(campaign))]
    if not quiet:
        parts += _section("Equivalent mutants, and why no check can tell them from correct code", _equivalents(campaign))
        for what in PARTS:
            parts += _section(f"Killed, but the report does not name the {what}", _unnamed(campaign, what))
    parts += _section("Survived", (f"{fate.id}: {_story(campaign, fate)}" for fate in campaign.survivors), "bold red")
    parts += _section("Killed by another check than the named one", _wrong(campaign), "bold red")
    parts += _section("Said to be equivalent, and killed all the same", _refuted(campaign), "bold red")
    parts += _section("Correct code that was flagged", _flagged(campaign), "bold red")
    parts += _section(f"Margin under {LEAST:g}: chance may decide", _narrow(campaign), "bold red")
    parts += _section("Not tried: internal error", (f"{t.id}: {t.message}" for t in campaign.troubles), "bold red")
    parts.append(Text(score_line(campaign), style="green" if campaign.passed else "bold red"))
    return Group(*parts)


def score_line(campaign: Campaign) -> str:
    """``112 of 112 mutants killed by their named check (100.0 %), 8 equivalent; ...``."""
    score = f"{len(campaign.killed)} of {len(campaign.bugs)} mutants killed by their named check ({100 * campaign.score:.1f} %)"
    equivalent = f", {len(campaign.fates) - len(campaign.bugs)} equivalent"
    count = len({fate.kind for fate in campaign.fates})
    kinds = f", {count} kind{'s' * (count != 1)}"
    right = [control for control in campaign.passes if control.passed]
    controls = f"; {len(right)} of {len(campaign.passes)} correct subjects unflagged" if campaign.passes else ""
    stated = {what: len(campaign.killed) - campaign.unstated(what) for what in PARTS}
    named = ", ".join(f"{what} {100 * campaign.named(what):.0f} % of {stated[what]}" for what in PARTS)
    enough = all(campaign.named(what) >= NAMED for what in PARTS)
    floor = "" if enough or not campaign.whole else f" (at least {100 * NAMED:.0f} % each wanted)"
    return f"{score}{equivalent}{kinds}{controls}; named: {named}{floor}"


def _matrix(campaign: Campaign) -> Table:
    checks = list(CHECKS)
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    for column in ("mutant", "subject"):
        table.add_column(column, no_wrap=True)
    for check in checks:
        table.add_column(check[:SHORT], justify="center", no_wrap=True)
    for column in ("cases", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("named", no_wrap=True)
    kind = ""
    for fate in campaign.fates:
        if fate.kind != kind:
            kind = fate.kind
            table.add_row(Text(_kind_line(campaign, kind), style="bold"))
        marks = [_mark(fate, check) for check in checks]
        table.add_row(f"  {fate.id}", fate.subject, *marks, str(fate.cases), f"{fate.seconds:.1f}", _named(campaign, fate))
    return table


def _kind_line(campaign: Campaign, kind: str) -> str:
    bugs = [fate for fate in campaign.bugs if fate.kind == kind]
    return f"{kind}: {sum(fate in bugs for fate in campaign.killed)} of {len(bugs)}"


def _mark(fate: Fate, check: str) -> Text:
    if check == fate.expected_check and fate.status != "equivalent":
        return Text(HIT, style="green") if check in fate.fired else Text(MISSED, style="bold red")
    return Text(ALSO if check in fate.fired else "")


def _named(campaign: Campaign, fate: Fate) -> str:
    if campaign.mutants[fate.id].equivalent:
        return "equivalent" if fate.status == "equivalent" else "refuted"
    return " ".join(what for what in PARTS if getattr(fate, what)) if fate.case else "-"


def _margins(campaign: Campaign) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("check", "dtype", "largest clean", "weakest killed", "margin", "weakest mutant"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("largest clean", "weakest killed", "margin") else "left")
    for margin in campaign.margins:
        killed = (f"{margin.weakest.ratio:.3g}", f"{margin.value:.2g}", margin.weakest.id) if margin.weakest else ("-", "-", "none")
        table.add_row(margin.check, margin.dtype, f"{margin.clean:.2g}", *killed)
    return table


def _weakest(campaign: Campaign) -> Iterator[str]:
    for strength in campaign.strengths[:MOST_WEAK]:
        yield f"{strength.id}: {strength.ratio:.3g} times the bound of {strength.check} in {strength.dtype}"


def _narrow(campaign: Campaign) -> Iterator[str]:
    for margin in campaign.narrow:
        weakest = f"{margin.weakest.id} has {margin.weakest.ratio:.3g}" if margin.weakest else "no mutant"
        yield f"{margin.check} in {margin.dtype}: {margin.value:.2g}; {weakest} times the bound, correct code {margin.clean:.2g}"


def _legend() -> str:
    named = f"{HIT} the check that must kill it, {ALSO} others that fired as well, {MISSED} the named check did not fire"
    return f"{named}; cases and seconds: to the first kill; named: what the report on the shrunk case gets right"


def _story(campaign: Campaign, fate: Fate) -> str:
    return campaign.mutants[fate.id].story


def _stories(campaign: Campaign) -> Iterator[str]:
    for fate in campaign.fates:
        mutant = campaign.mutants[fate.id]
        yield f"{fate.id} ({fate.kind}; {fate.expected_check} of {fate.subject})\n  {mutant.story}\n  Seen in: {mutant.origin}"
        if fate.diagnosis:
            yield f"  Diagnosis: {fate.diagnosis}"
        if fate.case:
            yield f'  Replay: tpverify replay "{fate.case}"'


def _equivalents(campaign: Campaign) -> Iterator[str]:
    for fate in campaign.fates:
        mutant = campaign.mutants[fate.id]
        if mutant.equivalent:
            yield f"{fate.id} ({fate.cases} cases): {mutant.story} {mutant.equivalent}"


def _unnamed(campaign: Campaign, what: str) -> Iterator[str]:
    for fate in campaign.unnamed(what):
        mutant = campaign.mutants[fate.id]
        of_check = [violation for violation in fate.violations if violation.check == fate.killed_by]
        if what == "layer":
            got = ", ".join(violation.tensor or "no tensor" for violation in of_check)
            yield f"{fate.id}: expected {mutant.module!r} but got {got}"
        elif what == "ranks":
            got = "; ".join(f"{violation.tensor} {', '.join(map(str, violation.ranks))}".strip() for violation in of_check)
            yield f"{fate.id}: expected {mutant.ranks} of {of_check[0].world_size} ranks but got {got}"
        else:
            yield f"{fate.id}: expected {mutant.diagnosis!r} but got {fate.diagnosis or 'none'!r}"


def _wrong(campaign: Campaign) -> Iterator[str]:
    for fate in campaign.wrong_check:
        yield f"{fate.id}: expected {fate.expected_check} but got {', '.join(fate.fired)} ({_story(campaign, fate)})"


def _refuted(campaign: Campaign) -> Iterator[str]:
    for fate in campaign.refuted:
        yield f"{fate.id}: killed by {fate.killed_by} on {fate.case}, although {campaign.mutants[fate.id].equivalent}"


def _flagged(campaign: Campaign) -> Iterator[str]:
    for control in campaign.flagged:
        for violation in control.violations:
            yield f"{control.id}: {violation.check} {violation.tensor}: {violation.message.splitlines()[0]} ({violation.case})"
        if not control.violations:
            yield f"{control.id}: nothing was checked"


def _section(title: str, lines: Iterator[str] | Sequence[str], style: str = "") -> list[RenderableType]:
    found = [f"  {line}" for line in lines]
    return [Text(f"{title}:", style=style or "bold"), Text("\n".join(found) + "\n")] if found else []
