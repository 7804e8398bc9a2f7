"""Which fault of a reduction explains a wrong tensor: what each rank brought to the sum is known, so the sum can be done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tpverify.checks.rearranged import same
from tpverify.ledger.record import Record
from tpverify.run import Comparison

WHOLE_NUMBER = 1e-6
"""How far a number of contributions may be from a whole one."""

OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
    "AVG": lambda parts: parts.mean(0),
    "PRODUCT": lambda parts: parts.prod(0),
}
"""What else than a sum a reduction may have been, over dimension 0."""


def explain_by_summands(comparison: Comparison, phase: str, expected: torch.Tensor, actual: Mapping[int, torch.Tensor], fit: float) -> str:
    """The fault of a reduction that turns the expected value into what ranks hold, in words; "" if none fits.

    Needs a traced run, which captures what ranks bring to reductions. A sum that is done right and followed by something
    else (a bias) is taken care of: only the difference has to be explained.

    Args:
        phase: ``forward`` or ``backward``.
        expected: the logical tensor, which every rank should hold.
        actual: by rank, what it holds.
        fit: largest relative error of a fit.
    """
    if foreign := foreign_group(comparison, phase):
        return foreign
    if len(actual) < 2 or any(tensor.shape != expected.shape for tensor in actual.values()):
        return ""
    for parts in _captured(comparison, phase, expected):
        line = (
            _other_operation(parts, expected, actual, fit)
            or _silent(comparison, parts, actual, fit)
            or _other_counts(parts, expected, actual, fit)
        )
        if line:
            return line
    return ""


def foreign_group(comparison: Comparison, phase: str) -> str:
    """A collective of ranks with others than those of their TP group, in words; "" if there is none."""
    for record in comparison.parallel.beyond:
        if record.phase in (phase, "optimizer") and record.kind != "barrier":
            ranks = ", ".join(map(str, record.group_ranks))
            site = f" at {record.call_site}" if record.call_site else ""
            return f"{record.kind} went over ranks {ranks}, beyond the TP group{site}: a wrong group fits this"
    return ""


def _captured(comparison: Comparison, phase: str, expected: torch.Tensor) -> list[torch.Tensor]:
    """What all ranks brought to each reduction that has the tensor's size, the last reduction first: [ranks, *shape]."""
    by_rank = [_reductions(comparison, rank, phase, expected) for rank in comparison.members]
    count = min(map(len, by_rank))
    aligned = zip(*(records[len(records) - count :] for records in by_rank), strict=True)
    stacked = [torch.stack([record.payload[0].double().reshape(expected.shape) for record in records]) for records in aligned]
    return [parts for parts in reversed(stacked) if bool(parts.isfinite().all())]


def _reductions(comparison: Comparison, rank: int, phase: str, expected: torch.Tensor) -> Sequence[Record]:
    return [
        record
        for record in comparison.parallel.ledger.rank(rank)
        if record.phase == phase
        and record.payload
        and record.payload[0].is_floating_point()
        and record.payload[0].numel() == expected.numel()
    ]


def _other_operation(parts: torch.Tensor, expected: torch.Tensor, actual: Mapping[int, torch.Tensor], fit: float) -> str:
    if expected.numel() < 2 or not all(bool(part.any()) for part in parts):
        return ""  # one number, or zeros, may come from any operation
    total = parts.sum(0)
    for name, operation in OPERATIONS.items():
        candidate = expected - total + operation(parts)
        if not same(candidate, expected, fit) and all(same(tensor, candidate, fit) for tensor in actual.values()):
            return f"the {name} over ranks stands where their sum belongs: a wrong reduce op fits this"
    return ""


def _silent(comparison: Comparison, parts: torch.Tensor, actual: Mapping[int, torch.Tensor], fit: float) -> str:
    """Whether some rank brings nothing to the sum, as it rightly does to the lookup of ids that it does not own.

    All ranks must hold that sum, or that and a bias, which is the same in every row.
    """
    if comparison.subject.vocabulary is not None or not all(_is_sum(tensor.double(), parts.sum(0), fit) for tensor in actual.values()):
        return ""
    silent = [str(rank) for rank, part in enumerate(parts) if not bool(part.any())]
    if not silent or len(silent) == len(parts):
        return ""
    ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)}"
    return f"only zeros come from {ranks}: that the contribution of {ranks} is missing from the sum fits this"


def _is_sum(actual: torch.Tensor, total: torch.Tensor, fit: float) -> bool:
    rows = (actual - total).reshape(-1, actual.shape[-1]) if actual.dim() else (actual - total).reshape(1, 1)
    return same(actual, total, fit) or (len(rows) > 1 and same(actual, total + rows[0], fit))


def _other_counts(parts: torch.Tensor, expected: torch.Tensor, actual: Mapping[int, torch.Tensor], fit: float) -> str:
    """How often each rank's part is in what each rank holds, where these are whole numbers."""
    columns = parts.reshape(len(parts), -1).T
    if columns.shape[0] <= columns.shape[1] or int(torch.linalg.matrix_rank(columns)) < columns.shape[1]:
        return ""
    counts = {}
    for rank, tensor in actual.items():
        solution = torch.linalg.lstsq(columns, (tensor.double() - expected.double()).reshape(-1, 1)).solution.flatten() + 1
        whole = solution.round()
        explained = expected + torch.tensordot(whole - 1, parts, dims=1)
        if float((solution - whole).abs().max()) > WHOLE_NUMBER or not same(tensor, explained, fit):
            return ""
        counts[rank] = [int(count) for count in whole]
    if all(count == 1 for held in counts.values() for count in held):
        return ""
    return _in_words(counts)


def _in_words(counts: Mapping[int, list[int]]) -> str:
    first = next(iter(counts.values()))
    if any(held != first for held in counts.values()):
        sets = ", ".join(f"rank {rank} {_ranks(held)}" for rank, held in counts.items())
        twice = " of which some are counted twice" if any(2 in held for held in counts.values()) else ""
        return f"not every rank holds the sum of the same contributions ({sets}){twice}: a wrong group fits this"
    missing = [str(rank) for rank, count in enumerate(first) if count == 0]
    often = [f"that of rank {rank} counts {count} times" for rank, count in enumerate(first) if count not in (0, 1)]
    texts = []
    if missing:
        texts.append(f"the contribution of rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} is missing from the sum")
    if often:
        texts.append(", ".join(often) + (", so it is counted twice" if 2 in first else ""))
    return f"{' and '.join(texts)}: that fits exactly"


def _ranks(held: Sequence[int]) -> str:
    """The ranks whose contributions are held, with how often if not once."""
    ranks = [f"{rank} {count} times" if count != 1 else str(rank) for rank, count in enumerate(held) if count]
    return "that of no rank" if not ranks else f"that of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
