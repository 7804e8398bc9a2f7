"""What goes unnoticed when a collective fails: each operator's doing, holes in crippled checks, and collectives nobody needs."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import tpverify as tpv
from tpverify.ledger.ledger import Ledger
from tpverify.mutants.adequacy import adequacy
from tpverify.mutants.adequacy_result import LOOKS_LIKE, STATUSES, AdequacyResult, Outcome
from tpverify.mutants.adequacy_text import adequacy_line, render_adequacy, write_adequacy_json
from tpverify.mutants.perturbation import OPERATORS, Injection, InputLog, Perturbation, applies
from tpverify.mutants.sites import sites_of
from tpverify.simulator.world import run_world
from tpverify.subjects.builtin import BUILTIN
from tpverify.subjects.dtensor_mlp import DTensorMLPConfig
from tpverify.subjects.mappings import copy_to_region, reduce_from_region

FEW: dict[str, Any] = {"world_sizes": (2, 3), "max_examples": 3, "tries": 2}
"""Cases: enough for one of each world size."""


@dataclass(frozen=True)
class Sizes:
    """Elements; the input is [seq, features]."""

    seq: int = 1
    features: int = 1
    out: int = 1


class Reference(nn.Module):
    """x W."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.out, c.features))

    def forward(self, x: Tensor) -> Any:
        """[seq, features] -> [seq, out]."""
        return F.linear(x, self.weight)


class RowParallel(nn.Module):
    """x W, W cut along its features: one reduction, whose result the versions below communicate once more."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.group = tpv.tp_group()
        self.weight = nn.Parameter(torch.empty(c.out, c.features // self.group.size()))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        """[seq, features / world_size] -> [seq, out]."""
        partial = F.linear(x, self.weight)
        return self.again(partial.detach(), reduce_from_region(partial, self.group))

    def again(self, partial: Tensor, output: Tensor) -> Tensor:
        """Nothing more."""
        return output


class ReducedTwice(RowParallel):
    """The maximum over ranks of what all ranks hold."""

    def again(self, partial: Tensor, output: Tensor) -> Tensor:
        """Of the same value."""
        largest = output.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return output + (largest - output).detach()


class ResultUnused(RowParallel):
    """A maximum that nobody reads."""

    def again(self, partial: Tensor, output: Tensor) -> Tensor:
        """Of the partial result."""
        dist.all_reduce(partial.clone(), dist.ReduceOp.MAX, group=self.group)
        return output


class KeptInBuffer(RowParallel):
    """A maximum that is kept in a buffer, asynchronously reduced."""

    def again(self, partial: Tensor, output: Tensor) -> Tensor:
        """Of the partial result."""
        largest = partial.amax()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True).wait()
        self.largest.copy_(largest)
        return output


class Waits(RowParallel):
    """A barrier before the result is returned, a group of one rank, and a minimum of zeros."""

    def again(self, partial: Tensor, output: Tensor) -> Tensor:
        """Communicates nothing."""
        dist.barrier(self.group)
        dist.all_reduce(torch.zeros_like(partial), dist.ReduceOp.MIN, group=self.group)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        dist.all_reduce(output.detach().clone(), group=alone)
        return output


class Unreduced(RowParallel):
    """A wrong module."""

    def again(self, partial: Tensor, output: Tensor) -> Tensor:
        """The partial result."""
        return partial


def sizes(world_size: int) -> st.SearchStrategy[Sizes]:
    """Features are a multiple of the world size."""
    return st.builds(Sizes, st.integers(2, 3), st.integers(1, 2).map(lambda each: each * world_size), st.integers(2, 3))


def row_parallel(module: Callable[[Sizes], nn.Module], **fields: Any) -> tpv.Subject:
    """A subject of a user."""
    described: dict[str, Any] = {
        "name": module.__name__,
        "reference": Reference,
        "parallel": module,
        "configs": sizes,
        "inputs": lambda c: {"x": tpv.Input((c.seq, c.features), placement=tpv.Shard(1))},
        "placements": {"weight": tpv.Shard(1)},
    }
    return tpv.Subject(**{**described, **fields})


def outcomes(result: AdequacyResult, kind: str, **site: Any) -> dict[tuple[str, str], Outcome]:
    """Of the only such site, by operator and ranks."""
    found = [each for each in result.sites if each.kind == kind and all(getattr(each, key) == value for key, value in site.items())]
    assert len(found) == 1, [each.site for each in result.sites]
    return {(outcome.operator, outcome.ranks): outcome for outcome in found[0].perturbations}


INPUTS = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [100.0, 200.0, 300.0, 400.0, 500.0, 600.3]]


def communicate(kind: str) -> list[float]:
    """One collective of three ranks; what this rank is left with."""
    own = torch.tensor(INPUTS[dist.get_rank()])
    if kind == "all_reduce":
        dist.all_reduce(own)
    elif kind == "broadcast":
        dist.broadcast(own, 0)
    elif kind == "reduce":
        dist.reduce(own, 1)
    else:
        shape = {"all_gather": 18, "reduce_scatter": 2, "all_to_all": 6}[kind]
        output = torch.empty(shape)
        calls: dict[str, Callable[..., Any]] = {
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_to_all": dist.all_to_all_single,
        }
        calls[kind](output, own)
        own = output
    values: list[float] = own.tolist()
    return values


SUM = [111.0, 222.0, 333.0, 444.0, 555.0, 666.3]
PAIRS = [[INPUTS[rank][2 * part : 2 * part + 2] for part in range(3)] for rank in range(3)]


@pytest.mark.parametrize(
    ("kind", "operator", "rank", "expected"),
    [
        ("all_reduce", "drop", None, INPUTS),
        ("all_reduce", "drop", 1, [SUM, INPUTS[1], SUM]),
        ("all_reduce", "double", 2, [SUM, SUM, [3 * value for value in SUM]]),
        ("all_reduce", "delay", 0, [[*SUM[:3], *INPUTS[0][3:]], SUM, SUM]),
        ("all_reduce", "half-group", None, [[11.0, 22.0, 33.0, 44.0, 55.0, 66.0]] * 2 + [INPUTS[2]]),
        ("all_reduce", "as-max", None, [INPUTS[2]] * 3),
        ("all_reduce", "as-avg", 0, [[value / 3 for value in SUM], SUM, SUM]),
        ("all_reduce", "down-cast", 0, [[111.0, 222.0, 332.0, 444.0, 556.0, 664.0], SUM, SUM]),
        ("reduce", "drop", None, INPUTS),
        ("reduce_scatter", "drop", None, [PAIRS[rank][rank] for rank in range(3)]),
        ("reduce_scatter", "double", 1, [SUM[:2], [666.0, 888.0], SUM[4:]]),
        ("reduce_scatter", "swap", None, [SUM[2:4], SUM[4:], SUM[:2]]),
        ("reduce_scatter", "half-group", 2, [SUM[:2], SUM[2:4], INPUTS[2][4:]]),
        ("all_gather", "drop", 1, [sum(INPUTS, []), [0.0] * 6 + INPUTS[1] + [0.0] * 6, sum(INPUTS, [])]),
        ("all_gather", "swap", 0, [INPUTS[1] + INPUTS[2] + INPUTS[0], sum(INPUTS, []), sum(INPUTS, [])]),
        ("all_to_all", "drop", None, [[1.0, 2.0] + [0.0] * 4, [0.0] * 2 + [30.0, 40.0] + [0.0] * 2, [0.0] * 4 + [500.0, 600.3]]),
        ("all_to_all", "swap", None, [PAIRS[1][r] + PAIRS[2][r] + PAIRS[0][r] for r in range(3)]),
        ("broadcast", "drop", None, INPUTS),
        ("broadcast", "wrong-root", None, [INPUTS[0], INPUTS[1], INPUTS[1]]),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_an_operator_does(kind: str, operator: str, rank: int | None, expected: list[list[float]]) -> None:
    injection = Injection(Perturbation(operator, frozenset({(0, 0)}), rank))
    ledger, results, failure = run_world(communicate, 3, args=(kind,), seed=0, timeout=20.0, perturb=injection)
    assert failure is None and injection.reached == 1 and injection.changed
    assert applies(operator, ledger.records[0])
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted))


def test_other_group_reduces_over_both_groups() -> None:
    log = InputLog()
    _, plain, _ = run_world(communicate, 3, args=("all_reduce",), seed=0, timeout=20.0, perturb=log)
    assert plain[0] == pytest.approx(SUM)  # the log changes nothing
    injection = Injection(Perturbation("other-group", frozenset({(0, 0)})), {(0, 0): log.inputs[0, 0]})
    _, results, _ = run_world(communicate, 3, args=("all_reduce",), seed=0, timeout=20.0, perturb=injection)
    assert results[2] == pytest.approx([2 * value for value in SUM])


def test_a_site_has_one_record_for_each_group_that_communicates_there() -> None:
    def halves() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for _ in range(2):
            dist.all_reduce(torch.ones(2), group=groups[dist.get_rank() // 2])
        dist.barrier()

    ledger = Ledger(dataclasses.replace(record, phase="forward") for record in run_world(halves, 4, args=(), seed=0, timeout=20.0)[0])
    found = {str(site): [record.rank for record in records] for site, records in sites_of(ledger, (0, 1, 2, 3)).items()}
    part = "of (root) in forward of a part of the TP group"
    barrier = "barrier of (root) in forward"
    assert found == {f"all_reduce(SUM) {part}": [0, 2], f"all_reduce(SUM) #2 {part}": [0, 2], barrier: [0]}


def test_operators_that_change_no_bit_say_so() -> None:
    def equal() -> Tensor:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    injection = Injection(Perturbation("drop", frozenset({(0, 0)})))
    run_world(equal, 2, args=(), seed=0, timeout=20.0, perturb=injection)
    assert injection.reached == 1 and not injection.changed


DTENSOR_MLP = dataclasses.replace(BUILTIN["dtensor_mlp"], name="dtensor", configs=st.just(DTensorMLPConfig(seq=2, hidden=3, ffn=6)))


@pytest.mark.parametrize(
    ("subject", "max_examples", "operators"),
    [
        (BUILTIN["row_parallel_linear"], 8, None),
        (BUILTIN["mlp"], 4, ("drop", "double", "as-max", "as-avg", "down-cast")),
        (DTENSOR_MLP, 1, ("drop", "double", "as-max", "down-cast")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_all_faults_of_builtin_subjects_are_noticed(subject: tpv.Subject, max_examples: int, operators: Sequence[str] | None) -> None:
    result = adequacy(subject, world_sizes=(3,), max_examples=max_examples, operators=operators)
    assert result.passed and not result.failing and len(result.sites) >= 2
    missed = [(site.site, outcome) for site, outcome in result.outcomes if outcome.status != "killed"]
    assert missed == []
    assert {"drop", "down-cast"} <= {outcome.operator for _, outcome in result.outcomes}
    assert {outcome.ranks for _, outcome in result.outcomes} == {"all", "one"}
    assert {site.phase for site in result.sites} >= {"forward", "backward"}


def test_a_maximum_that_only_keeps_exponentials_small_may_be_rounded() -> None:
    result = adequacy(BUILTIN["vocab_parallel_cross_entropy"], operators=("drop", "down-cast"), **FEW)
    assert result.passed
    found = outcomes(result, "all_reduce", reduce_op="MAX")
    assert found["down-cast", "all"].looks_like == "rounding"
    assert found["drop", "all"].status == found["drop", "one"].status == "killed"


@pytest.mark.parametrize("module", [ReducedTwice, ResultUnused])
def test_a_collective_nobody_needs_looks_unneeded(module: type[RowParallel]) -> None:
    result = adequacy(row_parallel(module), operators=("drop", "as-sum"), **FEW)
    found = outcomes(result, "all_reduce", reduce_op="MAX")
    assert (found["drop", "all"].status, found["drop", "all"].looks_like) == ("unnoticed", "unneeded")
    assert ("same bits" in found["drop", "all"].evidence) == (module is ReducedTwice)
    assert [site.reduce_op for site in result.unneeded] == ["MAX"]
    assert outcomes(result, "all_reduce", reduce_op="SUM")["drop", "all"].killed_by == "forward"
    assert result.passed  # waste, but no hole in the checks
    assert "unneeded" in as_text(result)


def test_a_result_that_only_a_buffer_shows_is_a_hole() -> None:
    result = adequacy(row_parallel(KeptInBuffer), operators=("drop",), **FEW)
    found = outcomes(result, "all_reduce", reduce_op="MAX")
    assert found["drop", "all"].looks_like == "hole" and "largest" in found["drop", "all"].evidence
    assert "no check compares buffers" in found["drop", "all"].evidence
    assert not result.passed


class ColumnParallel(nn.Module):
    """x W, W cut along its outputs: the gradient of x is reduced in backward."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.group = tpv.tp_group()
        self.weight = nn.Parameter(torch.empty(c.features // self.group.size(), c.out))

    def forward(self, x: Tensor) -> Any:
        """[seq, out] -> [seq, features / world_size]."""
        return F.linear(copy_to_region(x, self.group), self.weight)


COLUMN = row_parallel(
    ColumnParallel,
    reference=lambda c: Reference(dataclasses.replace(c, out=c.features, features=c.out)),
    inputs=lambda c: {"x": tpv.Input((c.seq, c.out))},
    placements={"weight": tpv.Shard(0)},
    outputs=tpv.Shard(1),
    communication=lambda c, world_size: [tpv.Collective("all_reduce", "backward", reduce_op="SUM", count=int(world_size > 1))],
)


@pytest.mark.parametrize(
    ("checks", "holes", "killed_by"),
    [
        (None, set(), "input-gradient"),
        (("forward",), {"drop", "double", "delay", "half-group", "down-cast", "as-max", "as-avg"}, ""),
        (("forward", "communication"), {"delay", "half-group", "down-cast"}, "communication"),
        (("replication",), {"double", "down-cast", "as-max", "as-avg"}, "replication"),
    ],
)
def test_crippled_checks_leave_holes(checks: tuple[str, ...] | None, holes: set[str], killed_by: str) -> None:
    result = adequacy(COLUMN, checks=checks, **FEW)
    found = outcomes(result, "all_reduce")
    assert {operator for (operator, ranks), outcome in found.items() if outcome.looks_like == "hole" and ranks == "all"} == holes
    assert found["drop", "all"].killed_by == killed_by
    assert result.passed == (not holes)
    if checks == ("forward",):
        assert "x.grad changes by" in found["drop", "all"].evidence
        assert "input-gradient, which compares it, is not among the checks" in found["drop", "all"].evidence
        assert "UNNOTICED" in as_text(result)


def test_barriers_and_groups_of_one_rank_are_classes_of_their_own() -> None:
    result = adequacy(row_parallel(Waits), **FEW)
    assert {key: outcome.looks_like for key, outcome in outcomes(result, "barrier").items()} == {("drop", "all"): "barrier"}
    alone = outcomes(result, "all_reduce", group="part")
    assert {key: outcome.looks_like for key, outcome in alone.items()} == {("drop", "all"): "one rank"}
    zeros = outcomes(result, "all_reduce", reduce_op="MIN")  # shows nothing, so nothing is said to be unneeded
    assert {outcome.looks_like for outcome in zeros.values()} == {"no case"}
    assert result.passed and not result.unneeded and result.counts()["barrier"] == 1


def test_a_subject_that_fails_as_it_is_does_not_pass() -> None:
    result = adequacy(row_parallel(Unreduced), **FEW)
    assert not result.passed and len(result.failing) == result.cases_run
    assert result.failing[0][1] == "forward" and result.perturbed == 0
    assert "verify the subject first" in as_text(result)


def test_nothing_perturbed_is_no_success() -> None:
    result = adequacy(row_parallel(RowParallel), world_sizes=(1,), max_examples=2)
    assert (result.passed, result.perturbed) == (False, 0)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(tpv.CaseError, match="max_examples=0"):
        adequacy(row_parallel(RowParallel), max_examples=0)
    with pytest.raises(tpv.CaseError, match="operator='forget'"):
        adequacy(row_parallel(RowParallel), operators=("forget",))
    with pytest.raises(tpv.CaseError, match="check='colour'"):
        adequacy(row_parallel(RowParallel), checks=("colour",))


def test_equal_seeds_give_equal_documents() -> None:
    first, second = (adequacy(row_parallel(KeptInBuffer), seed=7, operators=("drop", "delay"), **FEW) for _ in range(2))
    assert write_adequacy_json(first) == write_adequacy_json(second)
    data = json.loads(write_adequacy_json(first))
    assert data["schema_version"] == 1 and data["passed"] is False
    site = data["sites"][0]
    assert (site["module"], site["phase"], site["kind"], site["group"]) == ("", "forward", "all_reduce", "tp")
    assert set(site["perturbations"][0]) == {"operator", "ranks", "status", "killed_by", "looks_like", "evidence", "cases", "case"}
    for outcome in (outcome for each in data["sites"] for outcome in each["perturbations"]):
        assert outcome["operator"] in OPERATORS and outcome["status"] in STATUSES
        assert outcome["looks_like"] in LOOKS_LIKE or outcome["status"] == "killed"


def test_progress_and_counts_add_up() -> None:
    seen: list[tuple[int, int]] = []
    result = adequacy(row_parallel(RowParallel), progress=lambda done, total: seen.append((done, total)), **FEW)
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1)) and {total for _, total in seen} == {len(seen)}
    assert sum(result.counts().values()) == len(seen)
    assert f"{result.counts()['killed']} noticed" in adequacy_line(result)


def as_text(result: AdequacyResult) -> str:
    """As the command line prints it."""
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None).print(render_adequacy(result, verbose=True))
    return stream.getvalue()
