"""The simulator against gloo processes: one program of all kinds of collectives, value by value."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpverify.simulator.world import simulate

ROOT = Path(__file__).parents[1]
WORLD_SIZE = 3
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def collectives(results: dict[str, Any]) -> None:
    """Collectives that gloo supports, into ``results``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, 2])

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)

    for dtype in DTYPES:
        for op in REDUCTIONS:
            x = draw(2, 3, dtype=dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            results[f"all_reduce {op} {dtype}"] = x
    for op in ("BAND", "BOR", "BXOR"):
        x = draw(5, dtype=torch.int64)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        results[f"all_reduce {op}"] = x
    parts, joined = [torch.zeros(2) for _ in range(size)], torch.zeros(size * 2, 3)
    dist.all_gather(parts, draw(2, dtype=torch.float32))
    dist.all_gather_into_tensor(joined, draw(2, 3, dtype=torch.float32))
    piece = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(piece, draw(2 * size, 3, dtype=torch.float32))
    sent, reduced = draw(3), draw(3)
    dist.broadcast(sent, 1)
    dist.reduce(reduced, 2)
    part = torch.zeros(2)
    dist.scatter(part, [torch.full((2,), float(r)) for r in range(size)] if rank == 1 else None, src=1)
    gathered = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(part, gathered, dst=0)
    swapped = torch.zeros(2 * size)
    dist.all_to_all_single(swapped, draw(2 * size, dtype=torch.float32))
    uneven = torch.zeros(sum((rank + source) % 3 for source in range(size)))
    out_sizes, in_sizes = [(rank + r) % 3 for r in range(size)], [(r + rank) % 3 for r in range(size)]
    dist.all_to_all_single(uneven, draw(sum(in_sizes), dtype=torch.float32), out_sizes, in_sizes)
    received = torch.zeros(2)
    works = [dist.isend(part.clone(), (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for work in works:
        work.wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    inner = draw(2)
    if rank != 1:
        dist.all_reduce(inner, group=group)
    results["functional"] = funcol.all_gather_tensor(draw(1, 2), 0, dist.group.WORLD) + 0
    results.update(parts=parts, joined=joined, piece=piece, sent=sent, part=part, gathered=gathered, swapped=swapped)
    results.update(uneven=uneven, received=received, objects=objects, inner=inner)
    if rank == 2:
        results["reduced"] = reduced
    assert list(map(len, uneven.split(out_sizes))) == out_sizes
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(size))


def main(folder: str, rank: int) -> None:
    """One gloo process."""
    store = dist.FileStore(os.path.join(folder, "store"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    results: dict[str, Any] = {}
    collectives(results)
    torch.save(results, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def collected() -> dict[str, Any]:
    results: dict[str, Any] = {}
    collectives(results)
    return results


@pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_values_are_those_of_gloo(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in range(WORLD_SIZE)]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE, "\n".join(errors)
    for rank, ours in enumerate(simulate(collected, WORLD_SIZE).results):
        theirs = torch.load(tmp_path / f"{rank}.pt")
        assert ours.keys() == theirs.keys()
        assert ours.pop("objects") == theirs.pop("objects")
        for name, value in theirs.items():
            if value is None:
                assert ours[name] is None
            else:
                torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
