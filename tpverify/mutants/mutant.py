"""A mutant: a bug planted in a built-in subject, with the check that must kill it and the diagnosis that must be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpverify.subjects.subject import Subject

KINDS = (
    "addend counted once per rank",
    "missing reduction",
    "doubled reduction",
    "moved reduction",
    "wrong group",
    "wrong reduce op",
    "wrong adjoint",
    "replicated gradient",
    "scale",
    "vocabulary",
    "cross-entropy",
    "fused layout",
    "heads",
    "normalisation",
    "tied",
    "contiguity",
    "order",
    "asynchronous",
    "precision",
    "detached",
    "waste",
    "sequence parallel",
    "isolation",
    "state",
    "conditional",
)
"""What a planted bug gets wrong; ``conditional``: wrong only for one TP degree, one pair of options or one coincidence of shapes."""

RANKS: dict[str, Callable[[int], frozenset[int]]] = {
    "all": lambda size: frozenset(range(size)),
    "first": lambda size: frozenset({0}),
    "last": lambda size: frozenset({size - 1}),
    "all but first": lambda size: frozenset(range(1, size)),
    "all but last": lambda size: frozenset(range(size - 1)),
}
"""Sets of ranks on which a bug shows, by world size."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A planted bug.

    Attributes:
        id: short and unique, words joined by hyphens.
        kind: one of ``KINDS``.
        story: what is wrong, in one sentence.
        origin: where such a bug has been seen: framework, and the symptom its users had.
        base: name of the built-in subject that it mutates.
        subject: the mutated subject.
        check: id of the check that must kill it.
        diagnosis: text that a line of diagnosis must contain, or "" where no pattern can fit.
        module: fnmatch pattern of the module or tensor that must be named first; the part up to the tensor's last name.
        ranks: one of ``RANKS``, or "" where it depends on the case.
        dtype: the working dtype in which it is looked for.
        equivalent: why no test can tell it from correct code; "" for a bug.
    """

    id: str
    kind: str
    story: str
    origin: str
    base: str
    subject: Subject
    check: str
    diagnosis: str = ""
    module: str = "*"
    ranks: str = "all"
    dtype: str = "float64"
    equivalent: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Expected one of {', '.join(KINDS)} but got kind={self.kind!r}")
        if self.ranks and self.ranks not in RANKS:
            raise ValueError(f"Expected one of {', '.join(RANKS)} but got ranks={self.ranks!r}")


_mutants: dict[str, Mutant] = {}


def registered() -> dict[str, Mutant]:
    """All mutants defined so far, by id, in order of definition."""
    return dict(_mutants)


def mutant(kind: str, base: Subject, check: str, *, id: str = "", layers: Sequence[type[nn.Module]] = (), **fields: Any) -> Any:
    """Define a mutant; a class decorator where the bug is a layer that is wrong, whose docstring is the story.

    Args:
        kind, check: see :class:`Mutant`.
        base: the subject to mutate.
        id: default: the class's name, its words joined by hyphens.
        layers: further wrong layers beside the decorated one.
        fields: ``origin`` and the other fields of :class:`Mutant`; all others replace fields of the subject.
    """

    def define(layer: type[nn.Module]) -> type[nn.Module]:
        story = " ".join((layer.__doc__ or "").split())
        add_mutant(id or _hyphenated(layer.__name__), kind, base, check, layers=(layer, *layers), story=story, **fields)
        return layer

    return define


def add_mutant(id: str, kind: str, base: Subject, check: str, *, layers: Sequence[type[nn.Module]] = (), **fields: Any) -> Mutant:
    """Define a mutant by wrong layers, by other fields of the subject, or by both.

    Raises:
        ValueError: the id is taken, or a field is out of range.
    """
    if id in _mutants:
        raise ValueError(f"Expected a new id but got id={id!r}")
    of_mutant = {name: fields.pop(name) for name in list(fields) if name in Mutant.__dataclass_fields__}
    subject = planted(base, f"tpverify.mutants:{id.replace('-', '_')}", *layers, **fields)
    _mutants[id] = Mutant(id=id, kind=kind, base=base.name, subject=subject, check=check, **of_mutant)
    return _mutants[id]


def add_again(id: str, dtype: str, check: str = "") -> Mutant:
    """The mutant once more, looked for in another working dtype.

    Args:
        check: id of the check that must kill it there; default: the same.
    """
    known = _mutants[id]
    name = f"{id}-in-{dtype}"
    subject = replace(known.subject, name=f"tpverify.mutants:{name.replace('-', '_')}")
    module = known.module if check in ("", known.check) else "*"
    _mutants[name] = replace(known, id=name, dtype=dtype, check=check or known.check, module=module, subject=subject)
    return _mutants[name]


def planted(base: Subject, name: str, *layers: type[nn.Module], **changes: Any) -> Subject:
    """``base`` with each of its layers that a wrong class derives from turned into that class.

    Args:
        name: of the new subject.
        layers: wrong classes; they must not need other attributes than the built-in class they derive from.
        changes: other fields of the subject that differ.
    """
    build = changes.pop("parallel", base.parallel)

    def parallel(config: Any) -> nn.Module:
        module: nn.Module = build(config)
        for wrong in layers:
            right = next(parent for parent in wrong.__mro__[1:] if parent.__module__.startswith(("tpverify.subjects.", "torch.")))
            for layer in module.modules():
                if type(layer) is right:
                    layer.__class__ = wrong
        return module

    return replace(base, **{"name": name, "parallel": parallel, **changes})


def _hyphenated(name: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).strip("-")
