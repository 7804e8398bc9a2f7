"""Check ``replication``: what ranks hold in common is bitwise equal on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tpverify.checks.finding import Finding
from tpverify.run import Comparison, Placed
from tpverify.sharding import FusedShard, Layout, Replicate, local_indices, sharded_dim
from tpverify.tolerance import bitwise_equal


def replication(comparison: Comparison) -> list[Finding] | None:
    """Replicated outputs, input gradients and parameter gradients agree in every bit between the ranks that hold them."""
    ranks = comparison.parallel.ranks
    if len(ranks) < 2:
        return None
    findings: list[Finding] = []
    looked = False
    parts: list[tuple[str, Sequence[Mapping[str, Placed]]]] = [
        ("{}", [run.outputs for run in ranks]),
        ("{}.grad", [run.input_gradients for run in ranks]),
        ("{}.grad", [run.parameter_gradients for run in ranks]),
    ]
    aliases = {name for names in ranks[0].ties for name in names[1:]}
    for pattern, held in parts:
        for name in held[0]:
            if name in aliases or any(name not in part for part in held):
                continue
            placed = [part[name] for part in held]
            found = _replicas_differ(pattern.format(name), placed)
            looked = looked or found is not None
            findings += found or []
    return findings if looked else None


def _replicas_differ(label: str, placed: Sequence[Placed]) -> list[Finding] | None:
    layout = placed[0].layout
    if isinstance(layout, FusedShard):
        return _units_differ(label, placed, layout)
    if not isinstance(layout, Replicate):
        return None
    first = placed[0].local
    others = [rank for rank, other in enumerate(placed) if not _same(first, other.local)]
    if not others:
        return []
    return [_finding(label, others, first, placed[others[0]].local)]


def _units_differ(label: str, placed: Sequence[Placed], layout: FusedShard) -> list[Finding] | None:
    """Units (heads) that neighbouring ranks hold in common."""
    size = sum(block.size for block in layout.blocks)
    world_size = len(placed)
    owner: dict[int, tuple[int, int]] = {}
    shared: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for rank in range(world_size):
        for position, index in enumerate(local_indices(size, layout, rank, world_size)):
            if index in owner:
                first_rank, first_position = owner[index]
                lists = shared.setdefault(rank, ([], [], []))
                for values, value in zip(lists, (first_rank, first_position, position), strict=True):
                    values.append(value)
            else:
                owner[index] = (rank, position)
    if not shared:
        return None
    findings = []
    for rank, (first_ranks, first_positions, positions) in shared.items():
        for first_rank in sorted(set(first_ranks)):
            pairs = [(a, b) for r, a, b in zip(first_ranks, first_positions, positions, strict=True) if r == first_rank]
            here, there = placed[rank].local, placed[first_rank].local
            if here is None or there is None:
                continue
            dim = _dim(layout, here)
            mine, theirs = (
                here.index_select(dim, torch.tensor([b for _, b in pairs])),
                there.index_select(dim, torch.tensor([a for a, _ in pairs])),
            )
            if not bitwise_equal(mine, theirs):
                findings.append(_finding(f"{label} (units shared with rank {first_rank})", [rank], theirs, mine))
    return findings


def _dim(layout: Layout, tensor: torch.Tensor) -> int:
    dim = sharded_dim(layout)
    return 0 if dim is None else dim % tensor.dim()


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and bitwise_equal(a, b))


def _finding(label: str, ranks: Sequence[int], expected: torch.Tensor | None, actual: torch.Tensor | None) -> Finding:
    message = f"Expected {label} to be bitwise equal on all ranks that hold it but rank {ranks[0]} differs from its replica"
    if expected is None or actual is None:
        message += f": {'None' if expected is None else 'a tensor'} there, {'None' if actual is None else 'a tensor'} here"
    elif expected.shape != actual.shape:
        message += f": shape {tuple(expected.shape)} there, {tuple(actual.shape)} here"
    else:
        different = int((expected != actual).sum())
        largest = float((expected.double() - actual.double()).abs().max())
        message += f": {different} of {expected.numel()} elements, by at most {largest:.3g}"
    return Finding(tuple(ranks), label, message)
