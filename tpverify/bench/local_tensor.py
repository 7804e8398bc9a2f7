"""Peer: torch's LocalTensorMode, which runs one program on tensors that hold the parts of all ranks; for DTensors only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from tpverify.bench.runners import Run, silent_world, within
from tpverify.bench.work import Tensors, Work
from tpverify.device import default_dtype


@contextlib.contextmanager
def local_tensors(work: Work) -> Iterator[Run]:
    """The mode, over a world of torch's group for dry runs."""
    from torch.distributed._local_tensor import LocalTensorMode, rank_map

    def run() -> list[Tensors]:
        with within(world), LocalTensorMode(work.world_size):
            own = [part.weights for part in work.parts]
            weights = {name: rank_map(lambda rank, name=name: own[rank][name]) for name in own[0]}  # type: ignore[misc]
            found: dict[str, Any] = dict(dataclasses.replace(work.parts[0], weights=weights)())
        parts = {name: getattr(gradient, "_local_tensors", None) or {} for name, gradient in found.items()}  # none: alike on all ranks
        return [{name: parts[name].get(rank, gradient) for name, gradient in found.items()} for rank in range(work.world_size)]

    world = silent_world(0, work.world_size)
    with default_dtype(work.dtype):
        yield Run(run, run)
