"""The campaign: every mutant must die by its named check, every control must pass; side by side, in processes of their own."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpverify.exploration import Explorer
from tpverify.lookup import builtin_subjects
from tpverify.mutants.catalogue import catalogue
from tpverify.mutants.control import Control
from tpverify.mutants.controls import controls
from tpverify.mutants.fate import MAX_EXAMPLES, Fate, fate_of
from tpverify.mutants.mutant import Mutant
from tpverify.mutants.outcome import Campaign, Pass, Trouble
from tpverify.mutants.workers import Failure, each
from tpverify.options import DTYPES
from tpverify.session import Session
from tpverify.strategies import DEFAULT_WORLD_SIZES
from tpverify.verification import check_case, typical_case

UNMUTATED_EXAMPLES = 24
"""Cases drawn of each built-in subject as it is: its mutants' kills mean nothing if it is flagged as well."""


@dataclass(frozen=True)
class Item:
    """What one call of a worker does.

    Attributes:
        what: ``mutant`` or ``control``.
        id: of either.
        seed: decides which cases are drawn.
        max_examples: cases drawn of a mutant.
    """

    what: str
    id: str
    seed: int
    max_examples: int


def selected(text: str = "", subject: str = "") -> dict[str, Mutant]:
    """The mutants whose kind or id contains ``text``, of one built-in subject if it is given."""
    wanted = text.lower()
    return {
        id: mutant for id, mutant in catalogue().items() if (wanted in mutant.kind.lower() or wanted in id) and subject in ("", mutant.base)
    }


def all_controls() -> dict[str, Control]:
    """The controls, and every built-in subject as it is."""
    unmutated = {
        name: Control(
            id=name,
            looks_like="nothing: the subject that mutants are made of",
            because="nothing is planted in it",
            subject=subject,
            max_examples=UNMUTATED_EXAMPLES,
            dtypes=DTYPES,
        )
        for name, subject in builtin_subjects().items()
    }
    return controls() | unmutated


def run(
    mutants: dict[str, Mutant],
    *,
    seed: int = 0,
    max_examples: int = MAX_EXAMPLES,
    jobs: int = 1,
    whole: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Campaign:
    """Try the mutants, their subjects as they are, and where the campaign is ``whole`` all controls.

    Args:
        mutants: of the catalogue, by id.
        jobs: processes; the outcome is the same for any number. An interrupt ends them, and the outcome is of those that are done.
        progress: called with (mutants and controls done, those to do).
    """
    bases = {mutant.base for mutant in mutants.values()}
    passing = {id: control for id, control in all_controls().items() if whole or id in bases}
    items = [Item("mutant", id, seed, max_examples) for id in mutants] + [Item("control", id, seed, 0) for id in passing]
    # What takes longest comes first, so that no worker is left alone with it at the end.
    order = list(builtin_subjects())
    subject_of = {id: mutant.base for id, mutant in mutants.items()}
    items.sort(key=lambda item: -order.index(subject_of.get(item.id, item.id)) if subject_of.get(item.id, item.id) in order else 0)
    fates: dict[str, Fate] = {}
    passes: dict[str, Pass] = {}
    troubles: dict[str, Trouble] = {}
    interrupted = False
    try:
        for done, (index, result) in enumerate(each(attempt, items, jobs), start=1):
            id = items[index].id
            if isinstance(result, Failure):
                troubles[id] = Trouble(id, result.message, result.traceback)
            elif isinstance(result, Fate):
                fates[id] = result
            else:
                passes[id] = result
            if progress is not None:
                progress(done, len(items))
    except KeyboardInterrupt:
        interrupted = True  # what is known by now counts
    return Campaign(
        seed=seed,
        whole=whole,
        fates=tuple(fates[id] for id in mutants if id in fates),
        passes=tuple(passes[id] for id in passing if id in passes),
        troubles=tuple(troubles[id] for id in (*mutants, *passing) if id in troubles),
        mutants=mutants,
        interrupted=interrupted,
    )


def attempt(item: Item) -> Fate | Pass:
    """One mutant's or control's turn, in a worker.

    Raises:
        SubjectError: its subject contradicts itself.
    """
    ready()
    if item.what == "mutant":
        return fate_of(catalogue()[item.id], seed=item.seed, max_examples=item.max_examples)
    return pass_of(all_controls()[item.id], seed=item.seed)


def pass_of(control: Control, *, seed: int = 0) -> Pass:
    """Verify a control, or a built-in subject as it is.

    Raises:
        SubjectError: the subject contradicts itself.
    """
    session = Session(control.subject, measure=True)
    explorer = Explorer(session, DEFAULT_WORLD_SIZES, control.max_examples, seed, control.dtypes)
    violations = explorer.shrink_all(explorer.explore(None))
    applied = tuple(check for check, count in session.applied.items() if count)
    return Pass(control.id, session.cases_run, applied, tuple(violations), session.largest)


@functools.cache
def ready() -> None:
    """Once in a worker: the first case of a process takes seconds, and all that is loaded for it may sway what Hypothesis draws."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs what a rank's exception says as well
    warnings.simplefilter("ignore")
    all_controls()
    subject = builtin_subjects()["row_parallel_linear"]
    check_case(subject, typical_case(subject, 2))
