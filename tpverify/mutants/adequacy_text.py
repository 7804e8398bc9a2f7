"""The adequacy of a subject's checks for people: which check notices each fault of each collective, and what goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpverify.mutants.adequacy_result import LOOKS_LIKE, AdequacyResult, Outcome, SiteOutcome

SHORT = {"parameter-gradient": "param-grad", "input-gradient": "input-grad", "communication": "ledger"}
"""Names of checks that are too long for a cell."""

CELLS = {"hole": "UNNOTICED", "unneeded": "unneeded", "barrier": "barrier"}
ALWAYS_TOLD = ("hole", "unneeded", "barrier", "one rank")
RANKS = {("all", "one"): "on all ranks or on one", ("all",): "on all ranks", ("one",): "on one rank"}
STYLES = {"killed": "green", "hole": "bold red", "unneeded": "yellow"}


def render_adequacy(result: AdequacyResult, *, verbose: bool = False) -> RenderableType:
    """Table, a few lines on what no check notices, and a closing line.

    Args:
        verbose: also on faults that there is nothing to notice of.
    """
    parts: list[RenderableType] = [_table(result)] if result.sites else []
    for case, check in result.failing:
        parts.append(Text(f"Left out: {check} fails on the unperturbed {case}: verify the subject first", style="red"))
    for reason, count in sorted(result.left_out.items()):
        parts.append(Text(f"Left out: {count} call{'s' * (count > 1)} {reason}"))
    for site in result.sites:
        for looks_like in LOOKS_LIKE if verbose else ALWAYS_TOLD:
            alike = [outcome for outcome in site.perturbations if outcome.looks_like == looks_like]
            if alike:
                parts.append(Text(explanation(site, alike), style=STYLES.get(looks_like, "")))
    parts.append(Text(adequacy_line(result), style="green" if result.passed else "bold red"))
    return Group(*parts)


def explanation(site: SiteOutcome, alike: Sequence[Outcome]) -> str:
    """Which faults of a site look alike, what they look like, the evidence, the user's line and the case of the first of them.

    Args:
        alike: at least one.
    """
    ranks: dict[str, list[str]] = {}
    for outcome in alike:
        ranks.setdefault(outcome.operator, []).append(outcome.ranks)
    named: dict[str, list[str]] = {}
    for operator, of_operator in ranks.items():
        named.setdefault(RANKS[tuple(of_operator)], []).append(operator)
    faults = "; ".join(f"{', '.join(operators)} {where}" for where, operators in named.items())
    first = alike[0]
    lines = [f"{site.site}: {LOOKS_LIKE[first.looks_like]}", faults, first.evidence]
    lines += [f"at {site.call_site}"] * bool(site.call_site) + [f"on {first.case}"] * bool(first.case)
    return "\n  ".join(lines)


def adequacy_line(result: AdequacyResult) -> str:
    """``mlp: 8 collectives, 114 faults: 113 noticed, 0 holes, 0 look unneeded, 1 with nothing to notice; 138 runs``."""
    counts = result.counts()
    faults = sum(counts.values()) - counts["barrier"] - counts["untested"]
    texts = [
        f"{result.subject}: {_plural(len(result.sites), 'collective')}, {_plural(faults, 'fault')}: {counts['killed']} noticed",
        _plural(counts["hole"], "hole"),
        f"{len(result.unneeded)} unneeded",
        f"{counts['equivalent']} with nothing to notice",
    ]
    texts += [f"{counts['untested']} untested"] * bool(counts["untested"])
    texts += [_plural(counts["barrier"], "barrier")] * bool(counts["barrier"])
    return f"{', '.join(texts)}; {result.cases_run} cases, {_plural(result.perturbed, 'perturbed run')}"


def write_adequacy_json(result: AdequacyResult) -> str:
    """The JSON document as text, keys sorted, with a final newline; see :meth:`AdequacyResult.as_dict`."""
    return json.dumps(result.as_dict(), indent=2, sort_keys=True) + "\n"


def _table(result: AdequacyResult) -> Table:
    operators = list(dict.fromkeys(outcome.operator for _, outcome in result.outcomes))
    table = Table("module", "phase", "collective", "ranks", *operators, box=box.SIMPLE, pad_edge=False)
    for site in result.sites:
        for position, ranks in enumerate(dict.fromkeys(outcome.ranks for outcome in site.perturbations)):
            named = (site.module or "(root)", site.phase, _collective(site)) if not position else ("", "", "")
            table.add_row(*map(Text, (*named, ranks)), *_cells(site, ranks, operators))
    return table


def _collective(site: SiteOutcome) -> str:
    operator = f"({site.reduce_op})" if site.reduce_op else ""
    number = f" #{site.ordinal + 1}" if site.ordinal else ""
    return f"{site.kind}{operator}{number}{'' if site.group == 'tp' else ', part'}"


def _cells(site: SiteOutcome, ranks: str, operators: list[str]) -> Iterator[Text]:
    found = {outcome.operator: outcome for outcome in site.perturbations if outcome.ranks == ranks}
    for operator in operators:
        outcome = found.get(operator)
        if outcome is None:
            yield Text("-")
        elif outcome.killed_by:
            yield Text(SHORT.get(outcome.killed_by, outcome.killed_by), style=STYLES["killed"])
        else:
            yield Text(CELLS.get(outcome.looks_like, outcome.looks_like), style=STYLES.get(outcome.looks_like, ""))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
