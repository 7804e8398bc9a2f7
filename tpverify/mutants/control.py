"""A control: correct code that looks like a bug, or has been reported as one, and must never be flagged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpverify.mutants.mutant import planted
from tpverify.options import DTYPES
from tpverify.subjects.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Control:
    """Correct code that must pass.

    Attributes:
        id: short and unique, words joined by hyphens.
        looks_like: what one may take it for.
        because: why it is right.
        subject: the unusual subject.
        max_examples: cases drawn of it.
        dtypes: working dtypes in which they are drawn, as far as the subject can run in them.
    """

    id: str
    looks_like: str
    because: str
    subject: Subject
    max_examples: int = 60
    dtypes: tuple[str, ...] = DTYPES[:1]


_controls: dict[str, Control] = {}


def defined() -> dict[str, Control]:
    """All controls defined so far, by id, in order of definition."""
    return dict(_controls)


def add_control(
    id: str,
    base: Subject,
    *,
    looks_like: str,
    because: str,
    layers: Sequence[type[nn.Module]] = (),
    max_examples: int = 60,
    dtypes: tuple[str, ...] = DTYPES[:1],
    **fields: Any,
) -> Control:
    """Define a control by other layers in place of those they derive from, by other fields of the subject, or by both.

    Raises:
        ValueError: the id is taken.
    """
    if id in _controls:
        raise ValueError(f"Expected a new id but got id={id!r}")
    subject = planted(base, f"tpverify.mutants:{id.replace('-', '_')}", *layers, **fields)
    _controls[id] = Control(id=id, looks_like=looks_like, because=because, subject=subject, max_examples=max_examples, dtypes=dtypes)
    return _controls[id]
