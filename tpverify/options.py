"""The text forms of options that the command line, the pytest plugin and the environment share; imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tpverify.errors import CaseError

WORLDS = ("simulator", "gloo", "nccl")
WORLD_SIZES_VARIABLE = "TPVERIFY_WORLD_SIZES"
WORLD_VARIABLE = "TPVERIFY_WORLD"


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Read ``"1,2,4"``: TP degrees, each at least 1, ascending and without repetition.

    Raises:
        CaseError: the text is not of that form.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise CaseError(f"Expected world sizes of at least 1, separated by commas, as in 1,2,4, but got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``"; did you mean NAME?"`` for the name closest to a mistyped one, or ""."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
