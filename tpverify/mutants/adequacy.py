"""Adequacy of a subject's checks: each of its collectives is made to fail in each way, and what goes unnoticed is told."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from tpverify.case import Case
from tpverify.checks.finding import bound_of
from tpverify.errors import CaseError
from tpverify.ledger.record import Record
from tpverify.lookup import addressed
from tpverify.mutants.adequacy_result import AdequacyResult, Outcome, SiteOutcome
from tpverify.mutants.perturbation import AT_ROOT, OPERATORS, Perturbation, applies, call_of, receivers
from tpverify.mutants.sites import Site, count_left_out
from tpverify.mutants.trial import COMPARED_BY, Bench, Change, Clean, Trial
from tpverify.runner import CASE_TIMEOUT
from tpverify.sharding import Partial
from tpverify.strategies import cases
from tpverify.subjects.subject import Subject

BATCH = 6
"""Cases drawn from one seed, as in an exploration: short runs see more kinds of cases."""

SHOWN = 3
"""How many changed tensors a sentence names."""

Progress = Callable[[int, int], None]
Candidate = tuple[Clean, tuple[Record, ...]]
"""A case, and its collectives at one site."""


def adequacy(
    subject: Subject,
    *,
    world_sizes: Sequence[int] = (2, 3, 4),
    max_examples: int = 24,
    seed: int = 0,
    checks: Collection[str] | None = None,
    operators: Collection[str] | None = None,
    tries: int = 6,
    timeout: float = CASE_TIMEOUT,
    progress: Progress | None = None,
) -> AdequacyResult:
    """Perturb every collective of a subject in every way, and tell which check notices, or what it looks like if none does.

    Cases are drawn as for :func:`tpverify.verify`, with one TP group, one call and contiguous inputs. A perturbation is tried on several of
    the cases in which more than one rank carries out the collective, until a check notices it.

    What is visible without a check: outputs, gradients, parameters and buffers. A result that only goes elsewhere (a log, an
    attribute) looks unneeded.

    Args:
        world_sizes: TP degrees to draw from; a world of one rank cannot be perturbed and is left out.
        max_examples: number of cases to draw.
        seed: decides which cases are drawn.
        checks: ids of the checks to apply; None = all.
        operators: names of the perturbations to try, see :data:`tpverify.mutants.perturbation.OPERATORS`; None = all.
        tries: number of cases on which a perturbation is tried at most.
        timeout: seconds for one run.
        progress: called with (perturbations done, perturbations to do).

    Raises:
        SubjectError: the subject contradicts itself or its reference raises.
        CaseError: an argument is out of range.
    """
    for name, value in (("max_examples", max_examples), ("tries", tries)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CaseError(f"Expected {name} to be at least 1 but got {name}={value!r}")
    for name in operators or ():
        if name not in OPERATORS:
            raise CaseError(f"Expected one of {', '.join(OPERATORS)} but got operator={name!r}")
    started = time.monotonic()
    subject = addressed(subject)
    several = tuple(size for size in world_sizes if size != 1) or tuple(world_sizes)
    bench = Bench(subject, checks, timeout)
    cleans = [bench.clean(case) for case in drawn_cases(subject, several, max_examples, seed)]
    held = [clean for clean in cleans if not clean.failed]
    campaign = _Campaign(bench, held, tries, tuple(OPERATORS if operators is None else operators))
    sites = campaign.run(subject, progress)
    return AdequacyResult(
        subject=subject.name,
        sites=sites,
        cases_run=len(cleans),
        perturbed=campaign.perturbed,
        failing=tuple((repr(clean.case), clean.failed) for clean in cleans if clean.failed),
        left_out=count_left_out(comparison.parallel.ledger for clean in held for comparison in clean.comparisons),
        seconds=time.monotonic() - started,
    )


def drawn_cases(subject: Subject, world_sizes: Sequence[int], count: int, seed: int) -> list[Case]:
    """At most ``count`` different cases that must be computed, each with one TP group, one call and contiguous inputs.

    Raises:
        SubjectError: no config can be drawn.
    """
    found: dict[str, Case] = {}

    def collect(case: Case) -> None:
        values = "normal" if case.values == "integers" else case.values  # small integers survive any cast
        plain = dataclasses.replace(case, calls="once", layout="contiguous", groups="world", values=values)
        if len(found) < count and not (subject.rejects is not None and subject.rejects(case.config, case.world_size)):
            found.setdefault(repr(plain), plain)

    config = settings(
        max_examples=BATCH,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    for batch in range(2 * -(-count // BATCH)):
        if len(found) < count:
            hypothesis.seed(seed * 1_000_003 + batch)(config(given(cases(subject, world_sizes))(collect)))()
    return list(found.values())


class _Campaign:
    """All perturbations of all sites.

    Args:
        bench: runs cases.
        cleans: cases with one TP group, each of which holds as it is.
        tries, operators: see :func:`adequacy`.
    """

    def __init__(self, bench: Bench, cleans: Sequence[Clean], tries: int, operators: Sequence[str]) -> None:
        self.perturbed = 0
        self._bench = bench
        self._cleans = cleans
        self._tries = tries
        self._operators = operators
        self._pairs: dict[int, Clean] = {}

    def run(self, subject: Subject, progress: Progress | None) -> tuple[SiteOutcome, ...]:
        """Every site's outcomes."""
        by_site: dict[Site, list[Candidate]] = {}
        for clean in self._cleans:
            for site, records in clean.sites[0].items():
                by_site.setdefault(site, []).append((clean, records))
        plans = {site: list(_plans(site, candidates, self._usable(subject))) for site, candidates in by_site.items()}
        total, done = sum(map(len, plans.values())), 0
        outcomes = []
        for site, candidates in by_site.items():
            found = []
            for operator, ranks, usable in plans[site]:
                found.append(self._outcome(site, operator, ranks, usable))
                done += 1
                if progress is not None:
                    progress(done, total)
            outcomes.append(_site_outcome(site, candidates, found or [_untried(site)]))
        return tuple(outcomes)

    def _usable(self, subject: Subject) -> list[str]:
        """Code that does not ask for its TP group cannot have two of them."""
        return [operator for operator in OPERATORS if operator in self._operators and (subject.subgroups or operator != "other-group")]

    def _outcome(self, site: Site, operator: str, ranks: str, candidates: Sequence[Candidate]) -> Outcome:
        trials: list[tuple[Clean, Trial]] = []
        # Once more from the start for one rank, which then is another one: some ranks may hold nothing.
        for attempt, (clean, records) in enumerate([*candidates, *(candidates if ranks == "one" else ())]):
            if len(trials) == self._tries:
                break
            by_group = [records]
            if operator == "other-group":
                clean = self._in_two_groups(clean)
                by_group = [of_group.get(site, ()) for of_group in clean.sites]
                if clean.failed or not len(by_group[0]) == len(by_group[-1]) > 0:
                    continue
            trial = self._try(clean, operator, None if ranks == "all" else attempt, by_group)
            if trial.killed_by:
                return Outcome(operator, ranks, "killed", killed_by=trial.killed_by, cases=len(trials) + 1, case=repr(clean.case))
            if trial.telling:
                trials.append((clean, trial))
        if not trials:
            return Outcome(
                operator, ranks, "untested", looks_like="no case", evidence="In no case that was drawn could it make a difference"
            )
        return _unnoticed(operator, ranks, trials, self._bench)

    def _in_two_groups(self, clean: Clean) -> Clean:
        """The case with a second TP group beside the first."""
        if id(clean) not in self._pairs:
            self._pairs[id(clean)] = self._bench.clean(dataclasses.replace(clean.case, groups="blocks"))
        return self._pairs[id(clean)]

    def _try(self, clean: Clean, operator: str, attempt: int | None, by_group: Sequence[Sequence[Record]]) -> Trial:
        """On all ranks, or on one of those of the first TP group that are handed anything: another one at each attempt."""
        self.perturbed += 1
        befallen = [record for of_group in by_group for record in of_group] if attempt is None else by_group[0]
        handed = receivers(befallen[0])
        rank = None if attempt is None else handed[-1 - attempt % len(handed)]
        pairs = [*zip(by_group[0], by_group[-1], strict=True), *zip(by_group[-1], by_group[0], strict=True)]
        others = {call_of(own): clean.inputs[call_of(other)] for own, other in pairs if call_of(other) in clean.inputs}
        return self._bench.perturbed(clean, Perturbation(operator, frozenset(map(call_of, befallen)), rank), others)


def _plans(site: Site, candidates: Sequence[Candidate], operators: Sequence[str]) -> Iterator[tuple[str, str, list[Candidate]]]:
    """Each operator that means anything at the site, on all ranks and on one, and the cases to try it on, best first."""
    for operator in operators:
        fitting = [candidate for candidate in candidates if all(applies(operator, record) for record in candidate[1])]
        if fitting:
            usable = _by_turns(fitting)
            yield operator, "all", usable
            if site.kind not in AT_ROOT:  # where only the root is handed anything, one rank is all
                yield operator, "one", usable


def _by_turns(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Ordinary values first; then a case of each world size in turn, worlds of two last: their halves are single ranks."""
    kinds: dict[tuple[bool, bool, int, str], list[Candidate]] = {}
    for candidate in candidates:
        case = candidate[0].case
        kinds.setdefault((case.values != "normal", case.world_size == 2, case.world_size, case.values), []).append(candidate)
    ordered = [(kind[0], position, kind, candidate) for kind, group in kinds.items() for position, candidate in enumerate(group)]
    return [candidate for *_, candidate in sorted(ordered, key=lambda item: item[:3])]


def _untried(site: Site) -> Outcome:
    if site.kind == "barrier":
        return Outcome(
            "drop", "all", "unnoticed", looks_like="barrier", evidence="A barrier carries no data: no result shows whether it is needed"
        )
    return Outcome("drop", "all", "untested", looks_like="one rank", evidence="No case had more than one rank carry it out")


def _site_outcome(site: Site, candidates: Sequence[Candidate], outcomes: Sequence[Outcome]) -> SiteOutcome:
    records = [record for _, of_case in candidates for record in of_case]
    where = records[0].call_site
    return SiteOutcome(
        site=str(site),
        **dataclasses.asdict(site),
        call_site=str(where) if where else "",
        world_sizes=tuple(sorted({len(record.group_ranks) for record in records})),
        perturbations=tuple(outcomes),
    )


def _unnoticed(operator: str, ranks: str, trials: Sequence[tuple[Clean, Trial]], bench: Bench) -> Outcome:
    """What it looks like that no check has noticed, by what has changed in the case that tells most."""
    clean, trial = max(trials, key=lambda pair: (max(map(_weight, pair[1].changes), default=0), pair[1].handed))
    looks_like, evidence = _judged(clean, trial, bench, len(trials))
    if operator == "drop" and ranks == "all" and looks_like != "hole":
        looks_like = "unneeded"
    status = "unnoticed" if looks_like in ("hole", "unneeded") else "equivalent"
    return Outcome(operator, ranks, status, looks_like=looks_like, evidence=evidence, cases=len(trials), case=repr(clean.case))


def _weight(change: Change) -> float:
    return 1 if change.rounding else 2


def _judged(clean: Clean, trial: Trial, bench: Bench, cases: int) -> tuple[str, str]:
    tried = f"in all {cases} cases tried" if cases > 1 else "in the only case tried"
    if not trial.handed:
        return "no effect", f"Ranks are handed the same bits {tried}"
    if not trial.changes:
        return "no effect", f"Ranks are handed other bits, and no output, gradient, parameter or buffer changes in any {tried}"
    worst = sorted(trial.changes, key=lambda change: (change.rounding, -change.relative))
    if worst[0].rounding:
        return "rounding", f"{_named(worst[0])} changes by {worst[0].relative:.1e}, which is within rounding, and nothing by more {tried}"
    visible = [change for change in worst if not change.rounding]
    texts = [
        f"{_named(change)} changes by {change.relative:.1e} on rank{'s' * (len(change.ranks) > 1)} {_listed(change)}" for change in visible
    ]
    more = f" (and {len(texts) - SHOWN} more)" if len(texts) > SHOWN else ""
    return "hole", f"{', '.join(texts[:SHOWN])}{more}: {_excuse(clean, visible[0], bench)}"


def _excuse(clean: Clean, change: Change, bench: Bench) -> str:
    """Why no check notices the change, as far as can be told."""
    check = COMPARED_BY.get(change.part, "")
    if not check:
        return f"no check compares {change.part}"
    if check not in bench.checks:
        return f"{check}, which compares it, is not among the checks applied"
    group = next(group for group in clean.comparisons if change.tensor in getattr(group.parallel.ranks[0], change.part))
    if change.tensor not in getattr(group.reference.ranks[0], change.part):
        return "the reference has nothing to compare it with"
    with contextlib.suppress(KeyError):
        if isinstance(getattr(group.parallel.ranks[change.ranks[0]], change.part)[change.tensor].layout, Partial):
            return "it is declared Partial, so that only the sum over ranks is compared"
    bound = bound_of(group, change.tensor if change.part == "outputs" else f"{change.tensor}.grad")
    if change.relative <= bound:
        return f"the tolerance is {bound:.1e}"
    return "no check that applies to the case compares it"


def _named(change: Change) -> str:
    return f"{change.tensor}.grad" if change.part.endswith("gradients") else change.tensor


def _listed(change: Change) -> str:
    return ", ".join(map(str, change.ranks))
