"""The text forms of options that the command line, the pytest plugin and the environment share; imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tpverify.errors import CaseError

WORLDS = ("simulator", "gloo", "nccl")
CPU, CUDA = DEVICES = ("cpu", "cuda")
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Working dtypes, the simplest to explain a failure in first."""
WORLD_SIZES_VARIABLE = "TPVERIFY_WORLD_SIZES"
WORLD_VARIABLE = "TPVERIFY_WORLD"
DEVICE_VARIABLE = "TPVERIFY_DEVICE"
DTYPES_VARIABLE = "TPVERIFY_DTYPES"


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Read ``"1,2,4"``: TP degrees, each at least 1, ascending and without repetition.

    Raises:
        CaseError: the text is not of that form.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise CaseError(f"Expected world sizes of at least 1, separated by commas, as in 1,2,4, but got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Read ``"float64,bfloat16"``: names of working dtypes, in their order and without repetition.

    Raises:
        CaseError: the text is not of that form.
    """
    return checked_dtypes([part.strip() for part in text.split(",")])


def checked_dtypes(names: Iterable[str]) -> tuple[str, ...]:
    """Working dtypes in their order and without repetition.

    Raises:
        CaseError: there is none, or one is unknown.
    """
    asked = tuple(names) if not isinstance(names, str) else (names,)
    for name in asked:
        if name not in DTYPES:
            raise CaseError(f"Expected one or more of {', '.join(DTYPES)} but got dtype={name!r}{did_you_mean(str(name), DTYPES)}")
    if not asked:
        raise CaseError(f"Expected one or more of {', '.join(DTYPES)} but got none")
    return tuple(name for name in DTYPES if name in asked)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``"; did you mean NAME?"`` for the name closest to a mistyped one, or ""."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
