"""The controls: each file of this folder defines some, and needs only to be there."""

from __future__ import annotations

import importlib
import pkgutil

from tpverify.mutants.control import Control, defined


def controls() -> dict[str, Control]:
    """All controls by id, in alphabetical order."""
    for name in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{name}")
    return dict(sorted(defined().items()))
