"""How near to its bound each comparison came, noted for those who ask: the margin between correct code and a planted bug."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_ratios: ContextVar[list[float] | None] = ContextVar("ratios", default=None)


@contextlib.contextmanager
def measuring(ratios: list[float]) -> Iterator[None]:
    """Within the block every comparison adds its error relative to its bound to ``ratios``: beyond 1 it is a finding."""
    token = _ratios.set(ratios)
    try:
        yield
    finally:
        _ratios.reset(token)


def is_measured() -> bool:
    """Whether anybody asks: working out an error that is clearly within its bound takes time."""
    return _ratios.get() is not None


def note(ratio: float) -> None:
    """Leave an error relative to its bound."""
    ratios = _ratios.get()
    if ratios is not None:
        ratios.append(ratio)
