"""Whether findings are diagnosed: whoever only asks whether something is wrong need not wait for the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_diagnosed: ContextVar[bool] = ContextVar("diagnosed", default=True)


@contextlib.contextmanager
def undiagnosed() -> Iterator[None]:
    """Within the block checks find what they find, and look for no pattern that fits."""
    token = _diagnosed.set(False)
    try:
        yield
    finally:
        _diagnosed.reset(token)


def is_diagnosed() -> bool:
    """Whether a pattern is looked for."""
    return _diagnosed.get()
