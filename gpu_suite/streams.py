"""Row-parallel layers that reduce asynchronously or on a side stream, each in a right and a wrong version."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from planted import plant
from torch import Tensor, nn

from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import row_parallel_linear
from tpverify.subjects.mappings import Group, apply

CYCLES = 100_000_000
"""For which a stream is kept busy: 50 ms at 2 GHz, so that what does not wait for it comes too early, not by chance."""
SECONDS = 0.05
"""The same for a CPU."""

_kept: deque[object] = deque(maxlen=256)
"""Buffers of streams that nobody waits for: what is written late must not hit memory that is in use again."""


def linger(x: Tensor) -> None:
    """Keep this rank's current stream, or its thread, busy."""
    if x.is_cuda:
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(SECONDS)


def asynchronous(x: Tensor, group: Group, *, wait: bool) -> Tensor:
    """Summed in place, and read at once; the last rank comes late, so that without a wait the others read too early."""
    if group.rank() == group.size() - 1:
        linger(x)
    work = dist.all_reduce(x, group=group, async_op=True)
    if wait and work is not None:
        work.wait()
    _kept.append(x)
    return x.clone()


def on_side_stream(x: Tensor, group: Group, *, wait: bool) -> Tensor:
    """Summed on a side stream, which is busy for a while before it hands over the sum."""
    result = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x, group=group)
        torch.cuda._sleep(CYCLES)
        result.copy_(x)
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    _kept.append((x, result, side))
    return result.clone()


def promised(x: Tensor, group: Group) -> Tensor:
    """Summed by a functional collective, whose result waits for itself."""
    return functional.all_reduce(x, "sum", group) + 0


REDUCTIONS = {
    "never_waited": lambda x, group: asynchronous(x, group, wait=False),
    "waited": lambda x, group: asynchronous(x, group, wait=True),
    "unsynchronised": lambda x, group: on_side_stream(x, group, wait=False),
    "synchronised": lambda x, group: on_side_stream(x, group, wait=True),
    "promised": promised,
}
"""By name, how the partial results are summed."""


class Sum(torch.autograd.Function):
    """One of the reductions / identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, how: str) -> Tensor:
        return REDUCTIONS[how](x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class NeverWaited(RowParallelLinear):
    """The result is read while it is on its way."""

    how = "never_waited"

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks."""
        return apply(Sum, partial, self.group, self.how)


class Waited(NeverWaited):
    """Its right twin."""

    how = "waited"


class Unsynchronised(NeverWaited):
    """The default stream does not wait for the side stream."""

    how = "unsynchronised"


class Synchronised(NeverWaited):
    """Its right twin."""

    how = "synchronised"


class Promised(NeverWaited):
    """Right without a wait of its own."""

    how = "promised"


def _planted(layer: type[nn.Module]) -> Any:
    return plant(row_parallel_linear, layer.__name__, layer)


never_waited, waited, unsynchronised, synchronised, promised_sum = map(
    _planted, (NeverWaited, Waited, Unsynchronised, Synchronised, Promised)
)
