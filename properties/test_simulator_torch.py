"""Unmodified torch.distributed programs on simulated ranks: groups, meshes, objects, functional collectives, DTensor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch.distributed import all_reduce as imported_all_reduce
from torch.distributed import init_process_group as imported_init
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpverify.errors import CollectiveMismatch
from tpverify.simulator.process_group import RELEASE_NAMES, SimProcessGroup
from tpverify.simulator.world import Simulation, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

ROOT = Path(__file__).parents[1]
NOT_COLLECTIVES = {
    "monitored_barrier",  # gloo only; torch refuses it on other backends
    "split_group",
    "merge_remote_group",
    "get_group_store",
    "set_timeout",
    "use_pg_for_symm_mem_rendezvous",
}


def run(program: Callable[[int], Any], world_size: int = 2, **options: Any) -> Simulation:
    return simulate(lambda: program(dist.get_rank()), world_size, **options)


def test_every_collective_method_of_this_release_is_ours() -> None:
    public = {name for name in vars(dist.ProcessGroup) if callable(getattr(dist.ProcessGroup, name)) and not name.startswith("__")}
    known = {name for names in RELEASE_NAMES for name in names}
    words = ("all", "reduce", "scatter", "gather", "broadcast", "send", "recv", "barrier")
    collectives = {name for name in public if any(word in name for word in words)} - NOT_COLLECTIVES
    assert collectives <= known
    assert {"_start_coalescing", "_end_coalescing"} <= public
    for names in RELEASE_NAMES:
        assert public.intersection(names) or names[0] == "gather_single", f"none of {names} exists in torch {torch.__version__}"
        assert all(name in vars(SimProcessGroup) for name in names)


@pytest.mark.parametrize("backend", [None, "gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_initialising_names_any_backend(backend: str | None) -> None:
    def program(rank: int) -> tuple[Any, ...]:
        assert dist.is_initialized()
        imported_init(backend, rank=rank, world_size=3, timeout=timedelta(seconds=5))
        group = dist.new_group([0, 2], backend=backend)
        x = torch.ones(1)
        imported_all_reduce(x)
        if rank != 1:
            dist.all_reduce(x, group=group)
        return x.item(), dist.get_backend(), dist.get_world_size(group), dist.get_rank(group)

    asked = backend or "gloo"
    assert run(program, 3).results == [(6.0, asked, 2, 0), (3.0, asked, -1, -1), (6.0, asked, 2, 1)]


def test_get_backend_answers_what_the_program_asked_for() -> None:
    def program(rank: int) -> list[str]:
        answers = [dist.get_backend()]
        dist.init_process_group("nccl")
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")]
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank, group=groups[0])
        assert gathered == [0, 1]
        answers += [dist.get_backend(group) for group in (None, *groups)]
        mesh = init_device_mesh("cpu", (2,))
        assert distribute_tensor(torch.ones(2), mesh, [Shard(0)]).full_tensor().tolist() == [1.0, 1.0]
        dist.monitored_barrier(groups[1])
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return [*answers, dist.get_backend()]

    assert run(program, 2).results == [["gloo", "nccl", "nccl", "gloo", "gloo"]] * 2


def test_a_destroyed_world_can_be_initialised_again() -> None:
    def program(rank: int) -> float:
        first = dist.new_group([0, 1])
        x = torch.ones(1)
        dist.all_reduce(x, group=first) if rank < 2 else None
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("nccl", init_method="env://")
        second = dist.new_group([1, 2])
        y = torch.ones(1)
        dist.all_reduce(y, group=second) if rank > 0 else None
        dist.all_reduce(x)
        dist.destroy_process_group()
        return x.item() + 10 * y.item()

    assert run(program, 3).results == [15.0, 25.0, 25.0]


def test_initialising_twice_or_as_another_rank_is_refused() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="rank=7"):
            dist.init_process_group("gloo", rank=7, world_size=2)
        with pytest.raises(ValueError, match="world_size=3"):
            dist.init_process_group("gloo", "env://", None, 3)
        dist.init_process_group("gloo")
        with pytest.raises(ValueError, match="second"):
            dist.init_process_group("gloo")

    run(program)


def test_questions_about_groups() -> None:
    def program(rank: int) -> None:
        group = dist.new_group([3, 1], group_desc="odd")
        assert group is dist.GroupMember.NON_GROUP_MEMBER if rank % 2 == 0 else group.group_desc == "odd"
        if rank % 2:
            assert dist.get_process_group_ranks(group) == [1, 3]
            assert (dist.get_rank(group), dist.get_world_size(group), group.size(), group.rank()) == (rank // 2, 2, 2, rank // 2)
            assert dist.get_global_rank(group, 1) == 3
            assert dist.get_group_rank(group, 3) == 1
        own, groups = dist.new_subgroups(2)
        assert len(groups) == 2
        assert dist.get_process_group_ranks(own) == ([0, 1] if rank < 2 else [2, 3])
        assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == [str(rank), str(rank), "4"]

    run(program, 4)


def test_a_group_that_only_its_members_create() -> None:
    def program(rank: int) -> float:
        x = torch.ones(1)
        if rank in (0, 3):
            dist.all_reduce(x, group=dist.new_group([0, 3], use_local_synchronization=True))
        return x.item()

    assert run(program, 4).results == [2.0, 1.0, 1.0, 2.0]


def test_new_group_synchronises_through_the_store_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")

    def program(rank: int) -> float:
        group = dist.new_group([0, 1])
        x = torch.ones(1)
        dist.all_reduce(x, group=group) if rank < 2 else None
        return x.item()

    assert run(program, 3).results == [2.0, 2.0, 1.0]


def test_groups_created_in_another_order_are_named() -> None:
    def program(rank: int) -> None:
        for ranks in ([0, 1], [2, 3]) if rank != 2 else ([2, 3], [0, 1]):
            dist.new_group(ranks)

    with pytest.raises(
        CollectiveMismatch, match=r"(?s)same order.*rank 0  new_group\(\[0, 1\]\) at .*rank 2  new_group\(\[2, 3\]\) at "
    ) as caught:
        run(program, 4)
    assert caught.value.ranks == (0, 2)
    assert str(caught.value).count(__file__) == 2


def test_objects() -> None:
    def program(rank: int) -> None:
        gathered: list[Any] = [None] * 3
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
        assert gathered == [{"rank": r, "text": "x" * r} for r in range(3)]
        at_root: list[Any] | None = [None] * 3 if rank == 1 else None
        dist.gather_object((rank,), at_root, dst=1)
        assert at_root == ([(0,), (1,), (2,)] if rank == 1 else None)
        sent: list[Any] = [f"from {rank}", rank]
        dist.broadcast_object_list(sent, src=2)
        assert sent == ["from 2", 2]
        part: list[Any] = [None]
        dist.scatter_object_list(part, ["a", "bb", "ccc"] if rank == 0 else None, src=0)
        assert part == ["a" * 1 if rank == 0 else "bb" if rank == 1 else "ccc"]
        if rank == 0:
            dist.send_object_list([{1, 2}], dst=1)
        if rank == 1:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=0)
            assert received == [{1, 2}]

    run(program, 3)


def test_the_store() -> None:
    def program(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set("key", "value")
            store.multi_set(["a", "b"], ["1", "2"])
            store.append("key", "s")
        assert store.get("key") == b"values"
        assert store.multi_get(["a", "b"]) == [b"1", b"2"]
        store.wait(["a"], timedelta(seconds=1))
        store.add("counter", rank + 1)
        dist.barrier()
        assert store.add("counter", 0) == 3
        assert store.check(["a"]) and not store.check(["nowhere"])
        dist.barrier()
        if rank == 0:
            assert store.compare_set("a", "1", "one") == b"one"
            assert store.compare_set("a", "1", "two") == b"one"
            assert store.compare_set("new", "", "fresh") == b"fresh"
            assert store.compare_set("other", "expected", "fresh") == b"expected"
            assert store.delete_key("b") and not store.delete_key("b")
            assert store.num_keys() == 4

    run(program)


def test_functional_collectives() -> None:
    def program(rank: int) -> None:
        group = dist.group.WORLD
        x = torch.tensor([1.0, 2.0]) + rank
        assert funcol.all_reduce(x, "sum", group).tolist() == [3.0, 5.0]
        assert funcol.all_gather_tensor(x, 0, group).tolist() == [1.0, 2.0, 2.0, 3.0]
        assert funcol.reduce_scatter_tensor(x, "sum", 0, group).tolist() == [3.0 + 2 * rank]
        assert funcol.all_to_all_single(x, None, None, group).tolist() == [1.0 + rank, 2.0 + rank]
        assert funcol.broadcast(x, 1, group).tolist() == [2.0, 3.0]
        many = funcol.all_reduce_coalesced([x, x * 2], "max", group)
        assert [part.tolist() for part in many] == [[2.0, 3.0], [4.0, 6.0]]
        many = funcol.all_gather_into_tensor_coalesced([x, x[:1]], group)
        assert [part.tolist() for part in many] == [[1.0, 2.0, 2.0, 3.0], [1.0, 2.0]]
        many = funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
        assert [part.tolist() for part in many] == [[3.0 + 2 * rank], [6.0 + 4 * rank]]
        assert x.tolist() == [1.0 + rank, 2.0 + rank]

    simulation = run(program)
    assert not simulation.ledger.hazards()


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="exists from torch 2.14")
def test_gather_into_one_tensor() -> None:
    def program(rank: int) -> None:
        x, output = torch.tensor([1.0, 2.0]) + rank, torch.zeros(4) if rank == 1 else None
        dist.gather_single(x, output, dst=1)
        assert output is None or output.tolist() == [1.0, 2.0, 2.0, 3.0]

    run(program)


def test_a_promised_tensor_is_waited_for_when_used() -> None:
    def program(rank: int) -> tuple[float, float]:
        promise = funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        assert isinstance(promise, funcol.AsyncCollectiveTensor)
        parts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(parts, promise)
        return (promise + 1).item(), parts[1].item()

    simulation = run(program)
    assert simulation.results == [(3.0, 2.0)] * 2
    assert not simulation.ledger.hazards()
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


def test_a_promise_never_used_is_recorded_and_not_kept() -> None:
    def program(rank: int) -> int:
        promise = funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        promises.append(promise)
        return torch._C._distributed_c10d._get_work_registry_size()

    promises: list[Any] = []
    simulation = run(program)
    assert simulation.results == [1, 1]
    assert {record.hazards for record in simulation.ledger} == {("never waited",)}


@pytest.mark.parametrize("last", ["None", "torch.ones(dist.get_rank() + 1)"])
def test_torchs_registry_of_promises_is_left_empty(last: str) -> None:
    code = f"""
import torch, torch.distributed as dist, torch.distributed._functional_collectives as funcol
from tpverify.errors import SimulationError
from tpverify.simulator.world import simulate
def program():
    promise = funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
    last = {last}
    assert last is None or dist.all_reduce(last)
try:
    simulate(program, 2)
except SimulationError:
    pass
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert "unwaited collective" not in done.stderr


def test_differentiable_collectives() -> None:
    def program(rank: int) -> None:
        x = (torch.tensor([1.0, 2.0], dtype=torch.float64) + rank).requires_grad_()
        weight = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
        for function in (lambda: dist_nn.all_reduce(x.clone()), lambda: funcol.all_reduce(x, "sum", dist.group.WORLD)):
            (gradient,) = torch.autograd.grad((function() * weight).sum(), x)
            assert gradient.tolist() == [3.0, 30.0]
        gathered = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        (gradient,) = torch.autograd.grad((gathered * torch.arange(4.0, dtype=torch.float64) * (rank + 1)).sum(), x)
        assert gradient.tolist() == ([0.0, 3.0] if rank == 0 else [6.0, 9.0])

    run(program)


def test_meshes() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        rows, columns = mesh["dp"].get_group(), mesh.get_group("tp")
        assert dist.get_process_group_ranks(columns) == ([0, 1, 2] if rank < 3 else [3, 4, 5])
        assert dist.get_process_group_ranks(rows) == [rank % 3, rank % 3 + 3]
        assert mesh.get_local_rank("tp") == rank % 3
        assert list(mesh.get_coordinate() or ()) == [rank // 3, rank % 3]
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh["tp"].get_group())
        assert x == (3.0 if rank < 3 else 12.0)
        flat = mesh._flatten("all")
        dist.all_reduce(x, group=flat.get_group())
        assert x == 45.0

    run(program, 6)


def test_dtensor() -> None:
    torch.manual_seed(0)
    whole = torch.randn(5, 4, dtype=torch.float64)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        sharded = distribute_tensor(whole.clone(), mesh, [Shard(0)])
        assert sharded.to_local().shape[0] == (2, 2, 1)[rank]
        assert torch.equal(sharded.full_tensor(), whole)
        assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
        partial = DTensor.from_local(whole.clone(), mesh, [Partial()])
        assert torch.allclose(partial.full_tensor(), 3 * whole)
        assert torch.allclose(partial.redistribute(mesh, [Shard(0)]).full_tensor(), 3 * whole)
        assert torch.allclose((sharded @ sharded.t()).full_tensor(), whole @ whole.t())
        assert torch.allclose(sharded.sum().full_tensor(), whole.sum())

    run(program, 3)


def test_random_operations_on_dtensors_agree_between_ranks() -> None:
    def program(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        x = torch.distributed.tensor.zeros(4, 3, device_mesh=mesh, placements=[Shard(0)])
        replicated = torch.distributed.tensor.zeros(4, 3, device_mesh=mesh, placements=[Replicate()])
        return torch.nn.init.normal_(x).full_tensor(), torch.nn.init.uniform_(replicated).to_local()

    (first, replica), (second, other) = run(program).results
    assert torch.equal(first, second)
    assert torch.equal(replica, other)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_parallelised_module_equals_its_reference(world_size: int) -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).double()
        x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        cotangent = torch.randn(2, 4, dtype=torch.float64)
        expected = model(x)
        gradients = torch.autograd.grad(expected, [x, *model.parameters()], cotangent)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
        output = model(x)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        output.backward(cotangent)
        got = [x.grad, *(parameter.grad.full_tensor() for parameter in model.parameters())]
        for gradient, reference in zip(got, gradients, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-12)

    simulation = run(program, world_size)
    assert not simulation.ledger.hazards()


def test_inference_mode() -> None:
    def program(rank: int) -> float:
        with torch.inference_mode():
            x = torch.ones(2)
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            return x[0].item()

    simulation = run(program)
    assert simulation.results == [4.0, 4.0]
    assert not simulation.ledger.hazards()
