"""Do two worlds agree about a program? Results bit for bit or within rounding, the same calls, the same refusals."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tpverify.errors import RankError, SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record

_OBJECT = re.compile(r"<.* object at 0x[0-9a-f]+>")

PREFIX = "output[1]["
"""How the labels of a program's results begin in a run of its subject."""


@dataclass(frozen=True)
class Outcome:
    """What one world made of a program.

    Attributes:
        outputs: by rank, what each step left, by label; empty where the program did not finish.
        error: why it did not finish, or None.
        ledger: every collective; None = this world keeps no record.
    """

    outputs: Sequence[Mapping[str, Tensor]]
    error: SimulationError | None
    ledger: Ledger | None = None


def unequal_outputs(ours: Outcome, theirs: Sequence[Mapping[str, Tensor]], slack: Sequence[Mapping[str, Tensor]] | None) -> list[str]:
    """Where results differ, one line each.

    Args:
        slack: by rank and label, how far each number may be off; None = not at all.
    """
    found = []
    for rank, (mine, other) in enumerate(zip(ours.outputs, theirs, strict=True)):
        if list(mine) != list(other):
            found.append(f"rank {rank} has results {list(mine)} and {list(other)}")
            continue
        for label, tensor in mine.items():
            allowed = None if slack is None else slack[rank].get(label)
            if not same(tensor, other[label], allowed):
                found.append(f"rank {rank} {label}: {_shown(tensor)} and {_shown(other[label])}")
    return found


def same(one: Tensor, other: Tensor, slack: Tensor | None = None) -> bool:
    """Equal in dtype, shape and every bit that counts (zeros have no sign, NaN equals NaN); or no further apart than ``slack``."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if _bits_equal(one, other):
        return True
    return slack is not None and bool((_wide(one) - _wide(other)).abs().le(slack).all())


def _bits_equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype == torch.bool:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if one.is_floating_point() or one.is_complex():
        wide, wider = _wide(one), _wide(other)
        return bool(((wide == wider) | (wide.isnan() & wider.isnan())).all())
    return torch.equal(one, other)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.reshape(-1)[:8].tolist()}"


def unequal_ledgers(ours: Ledger, theirs: Ledger, world_size: int) -> list[str]:
    """Where two ledgers of one program differ, record by record and field by field, one line each."""
    found = []
    for rank in range(world_size):
        mine, other = ours.rank(rank).records, theirs.rank(rank).records
        if len(mine) != len(other):
            found.append(f"rank {rank} issued {[record.describe() for record in mine]} and {[record.describe() for record in other]}")
            continue
        for one, two in zip(mine, other, strict=True):
            for name in (field.name for field in fields(Record) if field.name != "payload"):
                if getattr(one, name) != getattr(two, name):
                    found.append(f"rank {rank} #{one.op_id} {one.describe()}: {name} is {getattr(one, name)} and {getattr(two, name)}")
    return found


def unequal_errors(ours: SimulationError | None, theirs: SimulationError | None) -> list[str]:
    """Where two worlds that both name their errors differ; which of several ranks comes first is chance."""
    if type(ours) is not type(theirs):
        return [f"the run ended with {_named(ours)} and {_named(theirs)}"]
    if isinstance(ours, RankError) and isinstance(theirs, RankError):
        one, other = (_OBJECT.sub("", f"{type(error.exception).__name__}: {error.exception}") for error in (ours, theirs))
        different = one != other if ours.rank == theirs.rank else type(ours.exception) is not type(theirs.exception)
        return [f"rank {ours.rank} raised {one} and rank {theirs.rank} raised {other}"] if different else []
    one, other = (str(error).partition("\n")[0] for error in (ours, theirs))
    return [f"{one} and {other}"] if one != other else []


def _named(error: SimulationError | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {str(error).splitlines()[-1]}"


def same_error_class(ours: BaseException, theirs: Sequence[str]) -> bool:
    """Whether whoever handles the backend's exception handles ours.

    Args:
        theirs: names of the exception's classes, nearest first; () = none was raised.
    """
    nearest = next((name for name in theirs if isinstance(getattr(builtins, name, None), type)), None)
    return nearest in [cls.__name__ for cls in type(ours).__mro__]
