"""What the logical tensors of a case hold: parameters, inputs and cotangents, all from the case's seed."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from tpverify.case import Case
from tpverify.device import on_cpu
from tpverify.subjects.subject import Input

SPIKE = 1000.0
"""Beyond the logarithm of float64's largest number (709): exponentials overflow unless the global maximum is subtracted."""

SOME_IGNORED, ALL_IGNORED = 0.25, 1.0
"""Share of targets that a loss is told to ignore: a mean over none of them is where programs divide by zero."""

LARGEST_PARAMETER, LARGEST_INPUT = 2, 3
"""Largest small integers: products of K terms stay exact in float64 up to K of about 10**15."""


def generator(case: Case, group: int, *names: str) -> torch.Generator:
    """A generator that depends on the case's seed, the TP group's index and the names only."""
    text = "/".join((str(case.seed), str(group), *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw_parameter(case: Case, group: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """A parameter's logical value, float64: Gaussian, matrices scaled by 1/sqrt(last dimension); or small non-zero integers."""
    source = generator(case, group, "parameter", name)
    if case.values == "integers":
        return _integers(shape, LARGEST_PARAMETER, source)
    scale = 1 / math.sqrt(max(1, shape[-1])) if len(shape) > 1 else 1.0
    return _shaken(torch.randn(*shape, generator=source, dtype=torch.float64) * scale)


def draw_input(case: Case, group: int, name: str, spec: Input, shards: Sequence[Sequence[int]], spiked: bool) -> torch.Tensor:
    """An input's logical value: float64, or int64 for ids.

    Args:
        shards: the ids that each rank owns, for the value kinds that look for edges and owners.
        spiked: whether ``values="spike"`` applies: only logits are made to overflow an exponential.
    """
    source = generator(case, group, "input", name)
    if spec.kind == "integers":
        return _ids(case, spec, source, [ids for ids in shards if len(ids)])
    if case.values == "integers":
        drawn = _integers(spec.shape, LARGEST_INPUT, source)
    else:
        drawn = torch.randn(*spec.shape, generator=source, dtype=torch.float64)
    if case.values == "spike" and spiked:
        _add_spikes(drawn, [ids for ids in shards if len(ids)], source)
    return _shaken(_expandable(drawn) if case.layout == "expanded" else drawn)


def draw_cotangent(case: Case, group: int, label: str, shape: Sequence[int]) -> torch.Tensor:
    """The logical gradient that an output starts backward with, float64.

    For a scalar 1, as ``loss.backward()`` has it, or in half of the cases another number, as a scaled loss has it.
    """
    source = generator(case, group, "cotangent", label)
    with on_cpu():
        if not shape:
            scaled = bool(torch.randint(0, 2, (), generator=source))
            return _shaken(torch.rand((), generator=source, dtype=torch.float64) + 0.5 if scaled else torch.ones((), dtype=torch.float64))
        if case.values == "integers":
            drawn = _integers(shape, LARGEST_INPUT, source)
        else:
            drawn = torch.randn(*shape, generator=source, dtype=torch.float64)
        return _shaken(_expandable(drawn) if case.layout == "expanded" else drawn)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values as numbers of ``dtype``, in float64; ids as they are."""
    if dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype).double()


@contextlib.contextmanager
def magnitudes() -> Iterator[None]:
    """Within the block only the magnitudes of integer values are drawn: results then bound every partial sum of the signed values."""
    token = _magnitudes.set(True)
    try:
        yield
    finally:
        _magnitudes.reset(token)


_magnitudes: ContextVar[bool] = ContextVar("magnitudes", default=False)


@contextlib.contextmanager
def shaken(seed: int, relative: float) -> Iterator[None]:
    """Within the block, every value that is drawn is off by ``relative``, up or down, and tensors lie contiguously."""
    token = _shake.set((torch.Generator().manual_seed(seed), relative))
    try:
        yield
    finally:
        _shake.reset(token)


_shake: ContextVar[tuple[torch.Generator, float] | None] = ContextVar("shake", default=None)


def _shaken(tensor: torch.Tensor) -> torch.Tensor:
    shake = _shake.get()
    if shake is None:
        return tensor
    source, relative = shake
    return tensor * (1.0 + relative * (2 * torch.randint(0, 2, tensor.shape, generator=source) - 1))


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout; ``expanded`` asks for values that are constant along dimension 0."""
    if _shake.get() is not None:
        return tensor  # rows that were equal no longer are
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and tensor.dim() > 0:
        room = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), float("nan"))
        view = room[..., 1::2]
        view.copy_(tensor)
        return view
    if layout == "expanded" and tensor.dim() > 0 and tensor.shape[0] > 0:
        return tensor[:1].expand(tensor.shape)
    return tensor


def _integers(shape: Sequence[int], largest: int, source: torch.Generator) -> torch.Tensor:
    magnitude = torch.randint(1, largest + 1, tuple(shape), generator=source)
    sign = torch.randint(0, 2, tuple(shape), generator=source) * 2 - 1
    return (magnitude if _magnitudes.get() else magnitude * sign).to(torch.float64)


def _expandable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape).contiguous() if tensor.dim() and tensor.shape[0] else tensor


def _add_spikes(logits: torch.Tensor, shards: Sequence[Sequence[int]], source: torch.Generator) -> None:
    """Make exponentials overflow or vanish: per row one huge value, always on one and the same shard, or a huge offset of all values."""
    owned = torch.tensor(_one_of(shards, source))
    position = owned[torch.randint(0, len(owned), logits.shape[:-1], generator=source)].unsqueeze(-1)
    offset = torch.tensor([0.0, 0.0, SPIKE, -SPIKE], dtype=logits.dtype)[torch.randint(0, 4, position.shape, generator=source)]
    logits.scatter_add_(-1, position, torch.where(offset == 0, SPIKE, 0.0).to(logits.dtype))
    logits += offset


def _ids(case: Case, spec: Input, source: torch.Generator, shards: Sequence[Sequence[int]]) -> torch.Tensor:
    allowed: Sequence[int] = range(spec.low, spec.high)
    if case.values == "edges":
        edges = {ids[end] for ids in shards for end in (0, -1)} | {spec.low, spec.high - 1}
        allowed = [edge for edge in sorted(edges) if spec.low <= edge < spec.high]
    elif case.values == "one_shard":
        allowed = [identity for identity in _one_of(shards, source) if spec.low <= identity < spec.high] or allowed
    elif case.values == "repeated":
        allowed = [_one_of(allowed, source)]
    drawn = torch.tensor(allowed)[torch.randint(0, len(allowed), spec.shape, generator=source)]
    if spec.ignore is not None:
        ignored = ALL_IGNORED if torch.rand((), generator=source) < 1 / 8 else SOME_IGNORED
        drawn[torch.rand(spec.shape, generator=source, dtype=torch.float64) < ignored] = spec.ignore
    return drawn


def _one_of(options: Sequence[Any], source: torch.Generator) -> Any:
    return options[int(torch.randint(0, len(options), (), generator=source))]
