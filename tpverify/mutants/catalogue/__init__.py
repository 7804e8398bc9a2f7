"""The planted bugs: each file of this folder defines some, and needs only to be there."""

from __future__ import annotations

import importlib
import pkgutil

from tpverify.mutants.mutant import KINDS, Mutant, registered


def catalogue() -> dict[str, Mutant]:
    """All mutants by id, in the order of their kinds."""
    for name in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{name}")
    return {mutant.id: mutant for mutant in sorted(registered().values(), key=lambda mutant: (KINDS.index(mutant.kind), mutant.id))}
