"""Each check as the pure function it is: on hand-made runs, one that holds and its twin that does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bent_subjects import Sizes, bent
from torch import Tensor

import tpverify as tpv
from tpverify.checks.catalogue import CHECKS, apply, describe_checks, selected
from tpverify.checks.finding import Finding, bound_of, compare_placed
from tpverify.errors import CollectiveMismatch, Deadlock, SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record
from tpverify.run import Comparison, Placed, RankRun, Run
from tpverify.sharding import Layout, shard

GRID = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4)
REPLICATE, PARTIAL, ROWS, COLUMNS = tpv.Replicate(), tpv.Partial(), tpv.Shard(0), tpv.Shard(1)
NORMAL = tpv.Case("bent", Sizes(), 2)
EXACT = dataclasses.replace(NORMAL, values="integers")


def placed(whole: Tensor, layout: Layout, size: int = 2) -> list[Placed]:
    """A logical tensor on all ranks."""
    return [Placed(shard(whole, layout, rank, size), layout) for rank in range(size)]


def compared(
    expected: dict[str, dict[str, Tensor]],
    actual: dict[str, dict[str, list[Placed]]],
    *,
    subject: tpv.Subject | None = None,
    case: tpv.Case = NORMAL,
    ties: Sequence[tuple[str, ...]] = ((), ()),
    **reference: Any,
) -> Comparison:
    """Runs from tensors, by attribute of :class:`RankRun` and label; ``ties``: of the reference, of the ranks."""
    whole = {part: {label: Placed(tensor, REPLICATE) for label, tensor in tensors.items()} for part, tensors in expected.items()}
    ranks = [
        RankRun(**{part: {label: on[rank] for label, on in tensors.items()} for part, tensors in actual.items()})  # type: ignore[arg-type]
        for rank in range(case.world_size)
    ]
    for rank in ranks:
        rank.ties = (ties[1],) if ties[1] else ()
    alone = RankRun(**whole, ties=(ties[0],) if ties[0] else ())  # type: ignore[arg-type]
    ledger = reference.pop("ledger", Ledger(()))
    return Comparison(subject or bent(), case, Run([alone], Ledger(()), **reference), Run(ranks, ledger), tuple(range(case.world_size)))


def failed(error: SimulationError | None, *, subject: tpv.Subject | None = None, members: tuple[int, ...] = (0, 1)) -> Comparison:
    """A parallel run that did not finish."""
    return Comparison(subject or bent(), NORMAL, Run([RankRun()], Ledger(())), Run([], Ledger(()), error), members)


def messages(findings: list[Finding] | None) -> list[tuple[tuple[int, ...], str]]:
    """Ranks and tensor of every finding."""
    assert findings is not None
    return [(finding.ranks, finding.tensor) for finding in findings]


PARTS = [("forward", "outputs", "output"), ("input-gradient", "input_gradients", "x"), ("parameter-gradient", "parameter_gradients", "w")]


@pytest.mark.parametrize(("check", "part", "label"), PARTS)
@pytest.mark.parametrize("layout", [REPLICATE, PARTIAL, ROWS, COLUMNS, tpv.PaddedShard(1, 4), tpv.UnevenShard(0, "last")])
def test_a_tensor_that_is_right_in_its_layout_holds_and_one_wrong_element_does_not(check: str, part: str, label: str, layout: Any) -> None:
    right = compared({part: {label: GRID}}, {part: {label: placed(GRID, layout)}})
    assert CHECKS[check](right) == []
    wrong = placed(GRID, layout)
    assert wrong[1].local is not None
    wrong[1].local[0, 0] += 0.001
    findings = CHECKS[check](compared({part: {label: GRID}}, {part: {label: wrong}}))
    shown = label if check == "forward" else f"{label}.grad"
    assert messages(findings) == [((0, 1) if layout is PARTIAL else (1,), shown)]
    assert findings is not None
    assert "1 of" in findings[0].message


@pytest.mark.parametrize(("check", "part", "label"), PARTS)
def test_what_is_missing_or_of_another_shape_is_found(check: str, part: str, label: str) -> None:
    shown = label if check == "forward" else f"{label}.grad"
    none = [Placed(GRID, REPLICATE), Placed(None, REPLICATE)]
    assert messages(CHECKS[check](compared({part: {label: GRID}}, {part: {label: none}}))) == [((1,), shown)]
    narrow = [Placed(GRID, REPLICATE), Placed(GRID[:1], REPLICATE)]
    assert messages(CHECKS[check](compared({part: {label: GRID}}, {part: {label: narrow}}))) == [((1,), shown)]
    half = [Placed(GRID, PARTIAL), Placed(None, PARTIAL)]
    assert CHECKS[check](compared({part: {label: GRID}}, {part: {label: half}})) == []  # a bias that lives on rank 0 only


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_bound_lets_nan_or_infinity_pass(bad: float) -> None:
    wrong = GRID.clone()
    wrong[1, 1] = bad
    comparison = compared({"outputs": {"output": GRID}}, {"outputs": {"output": placed(wrong, REPLICATE)}}, depth=10**6, terms=10**12)
    assert messages(CHECKS["forward"](comparison)) == [((0, 1), "output")]
    both = compared({"outputs": {"output": wrong}}, {"outputs": {"output": placed(wrong, REPLICATE)}})
    # A reference that is not a number says nothing, so that nothing is held to have been checked.
    assert CHECKS["forward"](both) == (None if math.isnan(bad) else [])


def test_the_bound_is_rounding_and_none_at_all_where_arithmetic_is_exact() -> None:
    rounded = placed(GRID * (1 + 1e-15), COLUMNS)
    given: Any = ({"outputs": {"output": GRID}}, {"outputs": {"output": rounded}})
    assert CHECKS["forward"](compared(*given)) == []
    assert messages(CHECKS["forward"](compared(*given, case=EXACT))) == [((0, 1), "output")]
    assert bound_of(compared(*given, case=EXACT)) == 0.0
    assert bound_of(compared(*given, case=EXACT, subject=bent(exact=False))) > 0.0
    assert bound_of(compared(*given, case=EXACT, subject=bent(precision=torch.bfloat16))) > 0.0
    assert bound_of(compared(*given, depth=4, terms=100)) == pytest.approx(40 * bound_of(compared(*given)))


def test_a_gradient_that_cancels_is_noise_only_beside_a_large_one() -> None:
    noise = {"parameter_gradients": {"w": torch.zeros(4, dtype=torch.float64), "big": GRID}}
    alone = {"parameter_gradients": {"w": torch.zeros(4, dtype=torch.float64)}}
    tiny = {"w": placed(torch.full((4,), 1e-15, dtype=torch.float64), REPLICATE)}
    assert CHECKS["parameter-gradient"](compared(noise, {"parameter_gradients": {**tiny, "big": placed(GRID, REPLICATE)}})) == []
    assert messages(CHECKS["parameter-gradient"](compared(alone, {"parameter_gradients": tiny}))) == [((0, 1), "w.grad")]


def test_a_gradient_where_the_reference_has_none_must_be_none_or_zero() -> None:
    comparison = compared({}, {"parameter_gradients": {"w": placed(GRID, REPLICATE)}})
    comparison.reference.ranks[0].parameter_gradients["w"] = Placed(None, REPLICATE)
    assert messages(CHECKS["parameter-gradient"](comparison)) == [((0, 1), "w.grad")]
    zero = compared({}, {"parameter_gradients": {"w": placed(GRID * 0, REPLICATE)}})
    zero.reference.ranks[0].parameter_gradients["w"] = Placed(None, REPLICATE)
    assert CHECKS["parameter-gradient"](zero) == []


def test_checks_have_nothing_to_look_at_in_a_run_that_failed() -> None:
    assert {name for name, findings in apply(CHECKS, failed(tpv.RankError("", 1, ValueError()))).items() if findings is not None} <= {
        "execution",
        "communication",
        "buffers",
    }


@pytest.mark.parametrize("part", ["outputs", "input_gradients", "parameter_gradients"])
def test_replicas_are_equal_in_every_bit(part: str) -> None:
    def on(second: Tensor | None) -> list[Finding] | None:
        return CHECKS["replication"](compared({}, {part: {"t": [Placed(GRID, REPLICATE), Placed(second, REPLICATE)]}}))

    assert on(GRID.clone()) == []
    last_bit = GRID.clone()
    last_bit[2, 3] = torch.nextafter(last_bit[2, 3], torch.tensor(99.0, dtype=torch.float64))
    for second in (last_bit, None, GRID[:1], GRID.float(), GRID > 3):
        findings = on(second)
        assert [ranks for ranks, _ in messages(findings)] == [(1,)]
    zeros = torch.zeros(2, dtype=torch.float64)
    minus = CHECKS["replication"](compared({}, {part: {"t": [Placed(zeros, REPLICATE), Placed(-zeros, REPLICATE)]}}))
    assert messages(minus) != []
    for layout in (ROWS, PARTIAL):
        assert CHECKS["replication"](compared({}, {part: {"t": [Placed(GRID, layout), Placed(-GRID, layout)]}})) is None


def test_units_that_neighbours_share_are_equal_too() -> None:
    layout = tpv.FusedShard(0, (tpv.Block(4, 4), tpv.Block(2, 1)))
    whole = torch.arange(6.0, dtype=torch.float64)
    assert CHECKS["replication"](compared({}, {"outputs": {"t": placed(whole, layout)}})) == []
    own, shared = placed(whole, layout), placed(whole, layout)
    assert own[1].local is not None and shared[1].local is not None
    own[1].local[0] += 1
    shared[1].local[3] += 1
    assert CHECKS["replication"](compared({}, {"outputs": {"t": own}})) == []
    assert messages(CHECKS["replication"](compared({}, {"outputs": {"t": shared}}))) == [((1,), "t (units shared with rank 0)")]


def test_execution_is_violated_by_ranks_that_raise_or_hang_and_by_nothing_else() -> None:
    assert CHECKS["execution"](failed(None)) == []
    for other in (Deadlock("", (0,)), CollectiveMismatch("", (0, 1))):
        assert CHECKS["execution"](failed(other)) == []  # the communication check tells
    assert messages(CHECKS["execution"](failed(tpv.RankError("rank 1 raised", 1, ValueError("x"))))) == [((1,), "")]
    assert messages(CHECKS["execution"](failed(tpv.RankTimeout("late", (0, 1))))) == [((0, 1), "")]
    assert messages(CHECKS["execution"](failed(tpv.RankError("rank 2 raised", 2, ValueError("x")), members=(2, 3)))) == [((0,), "")]
    assert CHECKS["execution"](failed(tpv.RankError("rank 0 raised", 0, ValueError("x")), members=(2, 3))) == []  # of the other TP group
    saved = tpv.RankError("", 0, RuntimeError("a variable has been modified by an inplace operation"))
    findings = CHECKS["execution"](failed(saved))
    assert findings is not None and "in place over a tensor that autograd saved fits this" in findings[0].diagnosis


def test_rejection_asks_for_a_value_error_where_it_is_declared() -> None:
    declared = bent(rejects=lambda config, world_size: True)
    refused = tpv.RankError("", 0, ValueError("too odd"))
    assert CHECKS["rejection"](failed(refused)) is None
    assert CHECKS["execution"](failed(refused, subject=declared)) is None
    assert CHECKS["rejection"](failed(refused, subject=declared)) == []
    for other in (None, tpv.RankError("", 0, AssertionError("x")), Deadlock("", (0, 1)), tpv.RankTimeout("", (0,))):
        assert messages(CHECKS["rejection"](failed(other, subject=declared))) == [((0, 1), "")]


TIED = ("a", "b")
USES = {"a": GRID, "b": GRID * 10}


def tied(gradient: Tensor, *, on_ranks: tuple[str, ...] = TIED, in_reference: tuple[str, ...] = TIED) -> list[Finding] | None:
    """The tied check on a replicated parameter."""
    gradients = {name: placed(gradient, REPLICATE) for name in TIED}
    whole = {"parameters": dict.fromkeys(TIED, GRID), "parameter_gradients": dict.fromkeys(TIED, GRID * 11)}
    parts = {"parameters": {name: placed(GRID, REPLICATE) for name in TIED}, "parameter_gradients": gradients}
    return CHECKS["tied"](compared(whole, parts, ties=(in_reference, on_ranks), uses=USES))


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (11, ""),
        (1, "its use as b is missing"),
        (10, "its use as a is missing"),
        (12, "its use as a is counted twice"),
        (21, "its use as b is counted twice"),
        (5.5, "halved"),
        (22, "doubled"),
    ],
)
def test_a_tied_gradient_is_the_sum_of_its_uses(factor: float, says: str) -> None:
    findings = tied(GRID * factor)
    assert messages(findings) == ([((0, 1), "a.grad")] if says else [])
    assert findings is not None and all(says in finding.diagnosis for finding in findings)


def test_ties_are_the_same_on_both_sides() -> None:
    assert messages(tied(GRID * 11, on_ranks=())) == [((0, 1), "a")]
    assert messages(tied(GRID * 11, in_reference=())) == [((0, 1), "a")]
    assert tied(GRID * 11, in_reference=(), on_ranks=()) is None


def contribution(rank: int, payload: Tensor) -> Record:
    """A rank's part of the reduction of a lookup."""
    shapes, dtypes = (tuple(payload.shape),), ("float64",)
    return Record(
        op_id=0,
        rank=rank,
        kind="all_reduce",
        process_group=("tp", ""),
        group_ranks=(0, 1),
        collective_seq_id=1,
        p2p_seq_id=0,
        input_sizes=shapes,
        input_dtypes=dtypes,
        output_sizes=shapes,
        output_dtypes=dtypes,
        reduce_op="SUM",
        root=None,
        phase="forward",
        module="",
        call_sites=(),
        is_async=False,
        nbytes=payload.nbytes,
        elements=payload.numel(),
        payload=(payload,),
    )


def looked_up(spoil: Callable[[list[Tensor], Tensor, Tensor], None] = lambda parts, gradient, output: None) -> Comparison:
    """A lookup of ids in a table of 5 rows, padded to 6, on two ranks.

    Args:
        spoil: given what the ranks contribute, rank 1's gradient of the table and the output.
    """
    layout = tpv.PaddedShard(0, 1)
    table, ids = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(5, 2), torch.tensor([0, 2, 3, 4])
    parts = [table[ids] * ((ids // 3) == rank).unsqueeze(-1) for rank in range(2)]
    gradients, output = placed(table, layout), table[ids].clone()
    assert gradients[1].local is not None
    spoil(parts, gradients[1].local, output)
    vocabulary = tpv.Vocabulary(5, parameters=("w",), ids="ids", lookup="*")
    whole = {"outputs": {"output": table[ids]}, "parameters": {"w": table}, "parameter_gradients": {"w": table}}
    local = {"outputs": {"output": placed(output, REPLICATE)}, "parameters": {"w": placed(table, layout)}}
    return compared(
        whole,
        {**local, "parameter_gradients": {"w": gradients}},
        subject=bent(vocabulary=lambda config: vocabulary),
        inputs={"ids": ids},
        ledger=Ledger(contribution(rank, part) for rank, part in enumerate(parts)),
    )


def spoil_padding(parts: list[Tensor], gradient: Tensor, output: Tensor) -> None:
    gradient[2] = 1e-30


def spoil_foreign(parts: list[Tensor], gradient: Tensor, output: Tensor) -> None:
    parts[0][2] = 1e-30


def spoil_own(parts: list[Tensor], gradient: Tensor, output: Tensor) -> None:
    parts[1][3] = 0.0


def spoil_output(parts: list[Tensor], gradient: Tensor, output: Tensor) -> None:
    output[1] += 1


@pytest.mark.parametrize(
    ("spoil", "where", "says"),
    [
        (spoil_padding, [((1,), "w.grad")], "padding rows of w.grad"),
        (spoil_foreign, [((0,), "ids")], "rank 0 to contribute exactly zero for ids of other ranks but it contributes to ids 3"),
        (spoil_own, [((1,), "ids")], "rank 1 to contribute the rows of its own ids but it contributes nothing to ids 4"),
        (spoil_output, [((0, 1), "output")], "wrong for exactly ids 2"),
    ],
)
def test_a_vocabulary_is_owned_once_and_its_padding_is_inert(spoil: Any, where: Any, says: str) -> None:
    assert CHECKS["vocabulary"](looked_up()) == []
    findings = CHECKS["vocabulary"](looked_up(spoil))
    assert messages(findings) == where
    assert findings is not None and says in findings[0].message


def test_ignored_targets_give_their_logits_no_gradient() -> None:
    vocabulary = tpv.Vocabulary(4, targets="targets", logits="logits", ignore=-1)
    targets = torch.tensor([0, -1, 3])

    def check(gradient: Tensor) -> list[Finding] | None:
        whole: Any = {"input_gradients": {"logits": GRID}}
        local: Any = {"input_gradients": {"logits": placed(gradient, COLUMNS)}}
        subject = bent(vocabulary=lambda config: vocabulary)
        return CHECKS["vocabulary"](compared(whole, local, subject=subject, inputs={"targets": targets}))

    inert = GRID * torch.tensor([[1.0], [0.0], [1.0]])
    assert check(inert) == []
    inert[1, 3] = 1e-30
    assert messages(check(inert)) == [((1,), "logits.grad")]


def test_partial_parts_are_compared_by_their_sum_and_ranks_with_own_numbers_are_one_finding() -> None:
    halves = [Placed(GRID / 2, PARTIAL), Placed(GRID / 2, PARTIAL)]
    comparison = compared({"outputs": {"output": GRID}}, {"outputs": {"output": halves}})
    assert compare_placed(comparison, "t", GRID, dict(enumerate(halves))) == []
    once = [Placed(GRID, PARTIAL), Placed(GRID, PARTIAL)]
    (finding,) = compare_placed(comparison, "t", GRID, dict(enumerate(once)))
    assert "Partial, summed over ranks" in finding.message
    (finding,) = compare_placed(comparison, "t", GRID, {0: Placed(GRID * 2, REPLICATE), 1: Placed(GRID * 3, REPLICATE)})
    assert finding.ranks == (0, 1)


def test_numbers_that_look_alike_are_shown_in_full() -> None:
    comparison = compared({"outputs": {"output": GRID}}, {"outputs": {"output": placed(GRID + 1e-9, REPLICATE)}})
    findings = CHECKS["forward"](comparison)
    assert findings is not None and "expected 1 but got 1.0000000010000001" in findings[0].message


def test_every_check_is_described_and_can_be_selected() -> None:
    assert list(describe_checks()) == list(CHECKS) == list(selected(None))
    assert all(line.endswith(".") for line in describe_checks().values())
    assert list(selected(("forward", "execution"))) == ["execution", "forward"]
    for wrong in (("forwrd",), (), "forward"):
        with pytest.raises(tpv.CaseError):
            selected(wrong)
