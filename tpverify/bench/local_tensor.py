"""Peer: torch's LocalTensorMode, which runs one program on tensors that hold the parts of all ranks; for DTensors only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tpverify.bench.runners import Run
from tpverify.bench.work import Tensors, Work
from tpverify.device import default_dtype


@contextlib.contextmanager
def local_tensors(work: Work) -> Iterator[Run]:
    """The mode, over a world of torch's group for dry runs."""
    from torch.distributed._local_tensor import LocalTensorMode, rank_map
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def run() -> list[Tensors]:
        with LocalTensorMode(work.world_size):
            own = [part.weights for part in work.parts]
            weights = {name: rank_map(lambda rank, name=name: own[rank][name]) for name in own[0]}  # type: ignore[misc]
            found: dict[str, Any] = dict(dataclasses.replace(work.parts[0], weights=weights)())
        parts = {name: getattr(gradient, "_local_tensors", None) or {} for name, gradient in found.items()}  # none: alike on all ranks
        return [{name: parts[name].get(rank, gradient) for name, gradient in found.items()} for rank in range(work.world_size)]

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=work.world_size)
    try:
        with default_dtype(work.dtype):
            yield Run(run, run)
    finally:
        dist.destroy_process_group()
