"""Where surveyed bugs register, each with the checks that must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planted import plant
from torch import nn

import tpverify as tpv

BUGS: dict[str, tuple[tpv.Subject, set[str]]] = {}
"""Planted subjects, and the checks that must be among those that do not hold."""


def bug(base: tpv.Subject, *checks: str, **changes: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Plant the decorated layer in a subject."""

    def add(layer: type[nn.Module]) -> type[nn.Module]:
        add_bug(layer.__name__, base, *checks, layers=(layer,), **changes)
        return layer

    return add


def add_bug(name: str, base: tpv.Subject, *checks: str, layers: tuple[type[nn.Module], ...] = (), **changes: Any) -> None:
    """Plant layers, or change the subject."""
    BUGS[name] = (plant(base, name, *layers, **changes), set(checks))
