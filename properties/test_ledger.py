"""What the ledger records of a collective: phase, module path, call site, group, shapes, bytes; and its queries."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpverify.errors import CaseError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record
from tpverify.ledger.traffic import total_wire_bytes, wire_bytes, wire_elements
from tpverify.simulator import recorder
from tpverify.simulator.world import simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")


def ledger_of(program: Callable[[], Any], world_size: int = 2, **options: Any) -> Ledger:
    return simulate(program, world_size, **options).ledger


def places(ledger: Ledger) -> list[tuple[str, str]]:
    return [(record.phase, record.module) for record in ledger.rank(0)]


class BothWays(torch.autograd.Function):
    """all_reduce forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return BothWays.apply(self.inner(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Layer(), nn.ModuleList([Layer(), Layer()])
        self.alias = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.alias(x)


def cotangent() -> Tensor:
    return torch.ones(2, 3, requires_grad=True)


def test_forward_and_backward_belong_to_the_module_that_issued_them() -> None:
    ledger = ledger_of(lambda: Model()(cotangent()).sum().backward())
    path = ["Model.first", "Model.blocks.0", "Model.blocks.1", "Model.first"]
    assert places(ledger) == [("forward", name) for name in path] + [("backward", name) for name in reversed(path)]


def test_modules_are_named_from_the_root_that_the_caller_names() -> None:
    def program() -> None:
        model = Model()
        current = recorder.current()
        assert current is not None
        current.name_modules(model)
        twin = copy.deepcopy(model.first)
        model(cotangent())
        twin(cotangent())
        Layer.forward(twin, cotangent())

    assert places(ledger_of(program)) == [
        ("forward", "first"),
        ("forward", "blocks.0"),
        ("forward", "blocks.1"),
        ("forward", "first"),
        ("forward", "Layer"),
        ("other", ""),
    ]


def test_a_module_outside_the_tree_is_named_below_its_caller() -> None:
    helper = Layer()

    class Caller(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return helper(x)

    assert places(ledger_of(lambda: Caller()(cotangent()).sum().backward())) == [("forward", "Caller.Layer"), ("backward", "Caller.Layer")]


def test_a_module_that_raised_is_left() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError

    def program() -> None:
        with pytest.raises(LookupError):
            nn.Sequential(Fails())(cotangent())
        Layer()(cotangent())

    assert places(ledger_of(program)) == [("forward", "Layer")]


def test_collectives_of_torchs_own_autograd_functions() -> None:
    class Reduces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return dist_nn.all_reduce(x.clone())

    assert places(ledger_of(lambda: Reduces()(cotangent()).sum().backward())) == [("forward", "Reduces"), ("backward", "Reduces")]


def test_gradient_hooks_belong_to_the_parameters_module() -> None:
    def program(hook: str, replace_weight: bool) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model(cotangent())
        if replace_weight:
            model[1].weight = nn.Parameter(torch.ones(3, 3))
        getattr(model[1].weight, hook)(lambda grad: dist.barrier())
        model(cotangent()).sum().backward()

    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        for replace_weight in (False, True):
            assert places(ledger_of(program, args=(hook, replace_weight))) == [("backward", "Sequential.1")], hook


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute(use_reentrant: bool) -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x  # saves its input: without reentry, recomputation stops at the last tensor that is needed

    def program() -> None:
        model = nn.Sequential(Layer(), Layer(), Squares())
        y = checkpoint(model, cotangent(), use_reentrant=use_reentrant)
        y.sum().backward()

    paths = ["Sequential.0", "Sequential.1"]
    expected = [(phase, path) for phase in ("forward", "recompute") for path in paths]
    assert places(ledger_of(program)) == expected + [("backward", path) for path in reversed(paths)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_of_a_plain_function_belongs_to_its_module(use_reentrant: bool) -> None:
    class Recomputes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: BothWays.apply(t * 2).exp(), x, use_reentrant=use_reentrant)

    seen = places(ledger_of(lambda: Recomputes()(cotangent()).sum().backward()))
    assert seen[:2] == [("forward", "Recomputes"), ("recompute", "Recomputes")]
    # With reentry the graph is built anew inside backward, where no module marks it.
    assert seen[2:] == [("backward", "" if use_reentrant else "Recomputes")]


def test_recompute_by_an_autograd_function_of_ones_own() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                dist.barrier()
            dist.barrier()
            return grad * 2

    assert places(ledger_of(lambda: Again.apply(cotangent()).sum().backward())) == [("recompute", ""), ("backward", "")]


def test_a_backward_that_builds_a_graph_is_no_recompute() -> None:
    def program() -> None:
        x = cotangent()
        (gradient,) = torch.autograd.grad(Layer()(x).pow(2).sum(), x, create_graph=True)
        gradient.sum().backward()

    seen = [phase for phase, _ in places(ledger_of(program))]
    assert seen[:2] == ["forward", "backward"]
    assert set(seen[2:]) == {"backward"}


def test_optimizer_steps_and_their_closures() -> None:
    def program() -> None:
        model = Layer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)

        class Reduces(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                dist.barrier()
                return super().step(closure)

        def closure() -> Tensor:
            loss = model(cotangent()).sum()
            loss.backward()
            return loss

        dist.barrier()
        Reduces(model.parameters(), lr=0.1).step(closure)
        dist.barrier()

    phases = [phase for phase, _ in places(ledger_of(program, 3))]
    assert phases == ["other", "optimizer", "forward", "backward", "other"]


def test_a_phase_that_the_caller_names() -> None:
    def program() -> None:
        with recorder.phase("optimizer"):
            dist.barrier()
        dist.barrier()

    assert [phase for phase, _ in places(ledger_of(program))] == ["optimizer", "other"]
    with recorder.phase("forward"):
        assert recorder.current() is None


def test_call_sites_are_the_users_lines_innermost_first() -> None:
    def helper() -> None:
        dist.barrier()

    def program() -> None:
        helper()

    record = ledger_of(program).rank(0).records[0]
    lines = [inspect.getsourcelines(function)[1] + 1 for function in (helper, program)]
    assert [(site.filename, site.line, site.function) for site in record.call_sites] == [
        (__file__, lines[0], "helper"),
        (__file__, lines[1], "program"),
    ]


def test_equal_code_of_two_files_is_told_apart() -> None:
    source = "import torch.distributed as dist\ndef call():\n    dist.barrier()\n"
    calls = []
    for name in ("one.py", "two.py"):
        namespace: dict[str, Any] = {}
        exec(compile(source, name, "exec"), namespace)
        calls.append(namespace["call"])
    ledger = ledger_of(lambda: [call() for call in calls])
    assert [str(record.call_site) for record in ledger.rank(0)] == ["one.py:3", "two.py:3"]


def test_fields_of_a_record() -> None:
    def program() -> None:
        group = dist.new_group([0, 2], group_desc="outer")
        dist.barrier()
        if dist.get_rank() != 1:
            output = torch.zeros(4, 3, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(output, torch.ones(2, 3, dtype=torch.bfloat16), group=group)
            dist.reduce(torch.ones(5), 2, dist.ReduceOp.MAX, group=group)

    ledger = ledger_of(program, 3, capture=lambda record: record.kind == "all_gather")
    _, gathered, reduced = ledger.rank(2).records
    assert (gathered.op_id, gathered.rank, gathered.kind, gathered.collective_seq_id) == (1, 2, "all_gather", 1)
    assert gathered.process_group[1] == "outer"
    assert gathered.group_ranks == (0, 2)
    assert (gathered.input_sizes, gathered.output_sizes) == (((2, 3),), ((4, 3),))
    assert (gathered.input_dtypes, gathered.output_dtypes) == (("bfloat16",), ("bfloat16",))
    assert (gathered.elements, gathered.nbytes, gathered.is_async, gathered.root) == (12, 24, False, None)
    assert torch.equal(gathered.payload[0], torch.ones(2, 3, dtype=torch.bfloat16))
    assert gathered.profiling_name == "sim:all_gather"
    assert (reduced.reduce_op, reduced.root, reduced.collective_seq_id, reduced.elements, reduced.payload) == ("MAX", 1, 2, 5, None)
    assert reduced.describe() == "reduce(MAX, float32[5], root=1)"


def test_point_to_point_is_numbered_by_pair() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            for destination in (1, 2, 1):
                dist.send(torch.ones(1), destination)
        else:
            for _ in range(2 if dist.get_rank() == 1 else 1):
                dist.recv(torch.ones(1), 0)

    sends = ledger_of(program, 3).rank(0)
    assert [(record.root, record.p2p_seq_id, record.collective_seq_id) for record in sends] == [(1, 1, 0), (2, 1, 0), (1, 2, 0)]


def test_queries() -> None:
    ledger = ledger_of(lambda: Model()(cotangent()).sum().backward())
    assert ledger.ranks == (0, 1)
    assert len(ledger.where(phase="backward")) == 8
    assert len(ledger.where(module="*.blocks.*")) == 8
    assert len(ledger.where(kind="all_gather")) == 0
    assert ledger.counts()["forward", "Model.first", "all_reduce"] == 2
    assert ledger.elements() == 8 * 6
    assert ledger.nbytes() == 8 * 6 * 4
    assert not ledger.hazards()
    assert ledger.within([0]).records == ()
    assert len(ledger.within([0, 1, 2])) == len(ledger)
    assert Ledger(()).elements() == Ledger(()).nbytes() == 0


def test_ranks_agree_or_the_first_difference_is_named() -> None:
    ledger = ledger_of(lambda: Model()(cotangent()).sum().backward())
    assert ledger.disagreement() == ""
    changed = [replace(record, reduce_op="MAX") if (record.rank, record.op_id) == (1, 2) else record for record in ledger]
    assert "they differ in reduce op:" in Ledger(changed).disagreement()
    assert "#3" in Ledger(changed).disagreement()
    shortened = [record for record in ledger if (record.rank, record.op_id) != (1, 7)]
    assert "collective #8 but not rank 1" in Ledger(shortened).disagreement()


def test_a_ledger_survives_json() -> None:
    ledger = ledger_of(lambda: (Model()(cotangent()).sum().backward(), dist.broadcast(torch.ones(2), 1)), capture=lambda record: True)
    document = json.loads(json.dumps(ledger.as_dict()))
    assert Ledger.from_dict(document).records == ledger.records
    for broken in ({}, {**document, "schema_version": 99}, {**document, "records": [{}]}, {**document, "records": 3}):
        with pytest.raises(CaseError):
            Ledger.from_dict(broken)


@given(st.integers(1, 64), st.integers(0, 1000))
@settings(deadline=None)
def test_ring_traffic(world_size: int, elements: int) -> None:
    def record(kind: str) -> Record:
        shape = ((elements,),)
        sizes = {"input_sizes": shape, "output_sizes": shape, "input_dtypes": ("float64",), "output_dtypes": ("float64",)}
        fixed = {"op_id": 0, "rank": 0, "process_group": ("0", ""), "collective_seq_id": 1, "p2p_seq_id": 0, "reduce_op": "", "root": None}
        rest = {"phase": "other", "module": "", "call_sites": (), "is_async": False, "nbytes": 8 * elements, "elements": elements}
        return Record(kind=kind, group_ranks=tuple(range(world_size)), **sizes, **fixed, **rest)

    assert wire_elements(record("all_reduce")) == pytest.approx(
        wire_elements(record("reduce_scatter")) + wire_elements(record("all_gather"))
    )
    assert wire_elements(record("all_reduce")) * world_size == pytest.approx(2 * elements * (world_size - 1))
    assert wire_elements(record("barrier")) == wire_elements(record("recv")) == 0
    assert wire_elements(record("send")) == (elements if world_size > 1 else 0)
    assert wire_bytes(record("all_to_all")) == pytest.approx(8 * wire_elements(record("all_to_all")))
    assert total_wire_bytes(Ledger([record("send"), record("recv")]), 0) == wire_bytes(record("send"))
