"""Whether a report names the planted fault: the layer, the ranks and the pattern, as a reader of its first lines would take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tpverify.mutants.mutant import RANKS, Mutant
from tpverify.violation import Violation

IN_MESSAGE = re.compile(r" of (?:module )?([A-Za-z_][\w.]*)(?= at | but |:|$)", re.MULTILINE)
"""A module's path in the line about a collective."""


def is_of_module(violation: Violation) -> bool:
    """Whether a module is accused, not a tensor that came out wrong."""
    return bool(violation.tensor) and violation.message.startswith(f"Expected module {violation.tensor} ")


def first_named(violations: Sequence[Violation]) -> Violation | None:
    """The violation that says best where the fault is: of a module before that of a tensor, otherwise the first."""
    return next((violation for violation in violations if is_of_module(violation)), violations[0] if violations else None)


def names_of(violation: Violation) -> set[str]:
    """What the violation points at: the tensor, its parameter, its module; for a collective, the modules that issued it."""
    if not violation.tensor:
        return set(IN_MESSAGE.findall(violation.message)) or {""}
    label = re.sub(r" \(.*", "", violation.tensor)
    path = label.removesuffix(".grad")
    names = {violation.tensor, label, path}
    return names if is_of_module(violation) else names | {path.rpartition(".")[0]}


def names_layer(mutant: Mutant, violations: Sequence[Violation]) -> bool:
    """Whether what the named check points at first is where the bug was planted."""
    named = first_named(violations)
    return named is not None and any(fnmatchcase(name, mutant.module) for name in names_of(named))


def accused_ranks(violations: Sequence[Violation]) -> set[int]:
    """The ranks on which tensors, not modules as a whole, are wrong; of modules only where there is nothing else."""
    of_tensors = [violation for violation in violations if not is_of_module(violation)]
    return {rank for violation in of_tensors or violations for rank in violation.ranks}


def names_ranks(mutant: Mutant, violations: Sequence[Violation]) -> bool:
    """Whether the named check reports the bug on the ranks on which it shows."""
    if not violations:
        return False
    return not mutant.ranks or accused_ranks(violations) == RANKS[mutant.ranks](violations[0].world_size)


def names_pattern(mutant: Mutant, violations: Sequence[Violation]) -> bool:
    """Whether some line, of any check, gives the diagnosis."""
    return any(mutant.diagnosis in violation.diagnosis or mutant.diagnosis in violation.message for violation in violations)
