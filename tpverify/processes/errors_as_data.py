"""A rank's exception as data: its report, the classes it belongs to and its message; what is rebuilt is never unpickled."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from tpverify import errors
from tpverify.errors import RankError

_HOMES = (builtins, errors)
_LONGEST = 10_000


def described(error: RankError) -> tuple[str, list[str], str]:
    """The report, the names of the exception's known classes from the nearest on, and its message."""
    exception = error.exception
    known = [cls.__name__ for cls in type(exception).__mro__ if any(getattr(home, cls.__name__, None) is cls for home in _HOMES)]
    only = exception.args[0] if len(exception.args) == 1 else None
    return str(error), known, (only if isinstance(only, str) else _message(exception))[:_LONGEST]


def _message(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:
        return f"{type(exception).__name__} whose __str__ raises"


def rebuilt(rank: int, report: str, names: Sequence[str], message: str) -> RankError:
    """The error of a rank in another process; its ``exception`` is of the nearest class that can be made from a message."""
    for name in names:
        found = next((getattr(home, name) for home in _HOMES if hasattr(home, name)), None)
        if isinstance(found, type) and issubclass(found, BaseException):
            try:
                return RankError(report, rank, found(message))
            except TypeError:
                continue
    return RankError(report, rank, Exception(message))
