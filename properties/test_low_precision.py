"""Half precision: correct code passes for every TP degree, and bugs smaller than a rounding's noise are found and named."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpverify as tpv
from tpverify.case import Case
from tpverify.checks import contribution
from tpverify.checks.catalogue import CHECKS
from tpverify.lookup import builtin_subjects, read_case
from tpverify.low_precision import Spread, allowed_errors, allowed_scale, row_ratios, scale_of
from tpverify.options import DTYPES
from tpverify.runner import run_both
from tpverify.session import Session
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy
from tpverify.subjects.cross_entropy_subject import VocabParallelCrossEntropyConfig
from tpverify.subjects.embedding import VocabParallelEmbedding, VocabParallelEmbeddingConfig
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import RowParallelLinearConfig

SUBJECTS = builtin_subjects()
LOSS, TABLE, ROW = (SUBJECTS[name] for name in ("vocab_parallel_cross_entropy", "vocab_parallel_embedding", "row_parallel_linear"))
LOSS_CONFIG = VocabParallelCrossEntropyConfig(seq=8, batch=4, vocab=24)
TABLE_CONFIG = VocabParallelEmbeddingConfig(seq=4, batch=16, vocab=16, hidden=5)
ROW_CONFIG = RowParallelLinearConfig(seq=4, batch=4, in_features=48, out_features=6)
SIZES = (1, 2, 3, 4, 8)
HALVES = ("bfloat16", "float16")
U = 2.0**-8
SEED = 6
"""Of cases that tell: some targets count, and all ids are looked up."""


class ScaledLoss(VocabParallelCrossEntropy):
    """The loss times 1.01."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1 % too large."""
        return 1.01 * super().forward(logits, targets)


class DroppedRow(VocabParallelEmbedding):
    """The last id that rank 0 owns is looked up nowhere."""

    def _owned(self, ids: Tensor) -> Tensor:
        return super()._owned(ids) & ((ids != self.shard.stop - 1) | (self.group.rank() > 0))


class BiasOnTwoRanks(RowParallelLinear):
    """The first two ranks add the bias before the reduction, and nobody after it."""

    def forward(self, x: Tensor) -> Any:
        """[..., in_features / world_size] -> [..., out_features]."""
        partial = nn.functional.linear(x, self.weight, self.bias if self.group.rank() < 2 else None)
        return self.reduce(partial)


def bent(subject: tpv.Subject, right: type[nn.Module], wrong: type[nn.Module]) -> tpv.Subject:
    """The subject with a wrong layer in the place of the right one."""

    def parallel(config: Any) -> nn.Module:
        module = subject.parallel(config)
        assert type(module) is right
        module.__class__ = wrong
        return module

    return dataclasses.replace(subject, parallel=parallel)


BUGS: dict[str, tuple[tpv.Subject, type[nn.Module], type[nn.Module], Any, Callable[[int], bool]]] = {
    "a loss 1 % too large": (LOSS, VocabParallelCrossEntropy, ScaledLoss, LOSS_CONFIG, lambda size: True),
    "a vocabulary row dropped": (TABLE, VocabParallelEmbedding, DroppedRow, TABLE_CONFIG, lambda size: True),
    "a bias added by two ranks": (ROW, RowParallelLinear, BiasOnTwoRanks, ROW_CONFIG, lambda size: size > 1),
}


def violations(subject: tpv.Subject, config: Any, size: int, dtype: str, **options: Any) -> list[tpv.Violation]:
    """Of one case."""
    return tpv.check_case(subject, Case(subject.name, config, size, seed=SEED, dtype=dtype, **options))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bug", BUGS)
def test_small_bugs_are_caught_in_half_precision_and_their_correct_twins_pass(bug: str, size: int, dtype: str) -> None:
    subject, right, wrong, config, shows = BUGS[bug]
    assert violations(subject, config, size, dtype) == []
    found = violations(bent(subject, right, wrong), config, size, dtype)
    assert bool(found) == shows(size), found


def test_a_loss_one_per_cent_too_large_is_a_matter_of_scale_and_of_no_norm() -> None:
    found = violations(bent(LOSS, VocabParallelCrossEntropy, ScaledLoss), LOSS_CONFIG, 4, "bfloat16")
    assert {violation.tensor for violation in found} == {"output", "logits.grad"}
    assert all("to have the scale of the reference in torch.bfloat16" in violation.message for violation in found)
    assert "a constant factor fits this" in "".join(violation.diagnosis for violation in found)


def test_a_bias_on_two_of_four_ranks_counts_twice() -> None:
    found = violations(bent(ROW, RowParallelLinear, BiasOnTwoRanks), ROW_CONFIG, 4, "bfloat16")
    counted = [violation for violation in found if violation.check == "contribution"]
    assert len(counted) == 1 and "bias counts 2.0" in counted[0].message and "rank" not in counted[0].message.partition("but")[2]


ONE_FEATURE = [
    "Case('mlp', MLPConfig(seq=2050, ffn=5, bias=False, sequence_parallel=True), world_size=5, dtype='bfloat16')",
    "Case('swiglu_mlp', MLPConfig(seq=2049, ffn=3, activation='swiglu', bias=False), world_size=3, seed=8, dtype='bfloat16')",
]
"""Many tokens of one feature: every rank's part is a function of that one number, and so are the roundings of the sum."""


@pytest.mark.parametrize("text", ONE_FEATURE)
def test_roundings_that_look_like_a_part_are_no_count_of_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = read_case(text)
    assert Session(subject).run(case) == ()
    original = contribution._least_squares

    def unweighted(columns: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        coefficients, errors, weights = original(columns, values)
        return coefficients, errors, torch.ones_like(weights)

    monkeypatch.setattr(contribution, "_least_squares", unweighted)
    assert {violation.check for violation in Session(subject).run(case)} == {"contribution"}


class Twice(RowParallelLinear):
    """Rank 1's part counts twice."""

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, and once more rank 1's summand."""
        once = super().reduce(partial)
        return once + super().reduce(partial * (self.group.rank() == 1))


class Forgetful(RowParallelLinear):
    """Rank 2's part gets lost after it was handed over."""

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, less rank 2's summand."""
        lost = super().reduce(partial * (self.group.rank() == 2))
        return super().reduce(partial) - lost


@pytest.mark.parametrize(("wrong", "says"), [(Twice, "the part of rank 1 counts 2.0"), (Forgetful, "the part of rank 2 counts 0.0")])
def test_a_part_that_counts_twice_or_not_at_all_is_named_by_its_rank(wrong: type[nn.Module], says: str) -> None:
    case = Case(ROW.name, ROW_CONFIG, 4, seed=3, dtype="bfloat16")
    found = CHECKS["contribution"](run_both(bent(ROW, RowParallelLinear, wrong), case)[0])
    assert found is not None and len(found) == 1
    assert says in found[0].message.replace("-0.0", "0.0")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in ("bert", "dtensor_llama")])
def test_built_in_subjects_hold_in_half_precision(name: str, dtype: str) -> None:
    result = tpv.verify(SUBJECTS[name], world_sizes=SIZES, max_examples=5, seed=11, dtypes=(dtype,))
    assert result.violations == ()
    assert result.dtypes == {dtype: result.cases_run}


def test_values_are_numbers_of_the_working_dtype_and_the_oracle_starts_from_them() -> None:
    comparison = run_both(ROW, Case(ROW.name, ROW_CONFIG, 2, seed=3, dtype="bfloat16"))[0]
    for values in (comparison.reference.inputs["x"], comparison.parallel.ranks[0].input_gradients["x"].local):
        assert values is not None and torch.equal(values.to(torch.bfloat16).double(), values.double())
    oracle = comparison.reference.oracle
    assert oracle is not None
    weight, output = oracle.parameters["weight"].local, oracle.outputs["output"].local
    assert weight is not None and output is not None and output.dtype == torch.float64
    held = comparison.reference.ranks[0].parameters["weight"].local
    assert held is not None and held.dtype == torch.bfloat16 and torch.equal(held.double(), weight)
    bias = oracle.parameters["bias"].local
    torch.testing.assert_close(output, nn.functional.linear(comparison.reference.inputs["x"], weight, bias), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("values", ["normal", "edges", "spike"])
@pytest.mark.parametrize("seed", range(4))
def test_ids_and_targets_do_not_depend_on_the_dtype(values: str, seed: int) -> None:
    case = Case(LOSS.name, LOSS_CONFIG, 2, seed=seed, values=values)
    wide, narrow = (run_both(LOSS, each)[0].reference for each in (case, dataclasses.replace(case, dtype="bfloat16")))
    assert torch.equal(wide.inputs["targets"], narrow.inputs["targets"])
    assert torch.equal(wide.inputs["logits"].to(torch.bfloat16).double(), narrow.inputs["logits"])
    assert narrow.oracle is not None
    single, oracle = (run.outputs["output"].local for run in (narrow.ranks[0], narrow.oracle))
    assert single is not None and oracle is not None
    assert float((single.double() - oracle).norm()) <= U * float(oracle.norm())


def test_small_integers_are_exact_only_where_magnitudes_stay_small() -> None:
    for features, exact in ((8, True), (96, False)):
        config = RowParallelLinearConfig(seq=1, in_features=features, out_features=3)
        comparison = run_both(ROW, Case(ROW.name, config, 4, values="integers", dtype="bfloat16"))[0]
        assert comparison.reference.exact is exact
    off_by_one = RowParallelLinearConfig(seq=1, in_features=8, out_features=3)

    class OffByOne(RowParallelLinear):
        """One element is 1 too large."""

        def add_bias(self, output: Tensor) -> Tensor:
            """The bias, and 1."""
            return super().add_bias(output) + 1

    assert violations(ROW, off_by_one, 4, "bfloat16", values="integers") == []
    found = violations(bent(ROW, RowParallelLinear, OffByOne), off_by_one, 4, "bfloat16", values="integers")
    assert any("0 (exact on small integers) allowed" in violation.message for violation in found)


def test_what_a_row_may_be_off_by() -> None:
    oracle = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    single = oracle + torch.tensor([[0.06, 0.08], [0.0, 0.0]])
    typical = 5 / math.sqrt(2)
    for size in (1, 4, 8):
        expected = torch.tensor([(1 + 2 * math.sqrt(size)) * 0.1 + 8 * U * 5 + 4 * U * typical, 4 * U * typical], dtype=torch.float64)
        torch.testing.assert_close(allowed_errors(single, oracle, size, torch.bfloat16), expected)
    ones, nothing = torch.ones(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    wide = allowed_errors(single, oracle, 1, torch.bfloat16, spread=Spread(ones, nothing, 0.0))
    assert float(wide[1]) == pytest.approx(3 * 2 * math.sqrt(2) + 4 * U * typical)
    plain = allowed_errors(single, oracle, 1, torch.bfloat16)
    for inside, counts in ((0.3, False), (0.6, True)):  # of a row of norm 5, an eighth of which is 0.625
        noisy = allowed_errors(single, oracle, 1, torch.bfloat16, spread=Spread(nothing, inside * ones, 0.0))
        assert (float(noisy[0]) > float(plain[0])) == counts
        assert float(noisy[1]) == pytest.approx(3 * 2 * inside * math.sqrt(2) + 4 * U * typical)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_wrong_unless_the_single_device_run_has_none_either(bad: float) -> None:
    oracle = torch.ones(2, 2, dtype=torch.float64)
    wrong = torch.tensor([[1.0, bad], [1.0, 1.0]])
    assert row_ratios(wrong, oracle, oracle, 2, torch.bfloat16).tolist() == [math.inf, 0.0]
    overflowed = torch.tensor([[1.0, math.inf], [1.0, 1.0]])
    assert row_ratios(wrong, overflowed, oracle, 2, torch.float16).tolist() == [0.0, 0.0]


def test_what_a_scale_may_be_off_by() -> None:
    oracle = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    single = oracle.to(torch.bfloat16)
    allowed = allowed_scale(single, single, oracle, 4096, 4, torch.bfloat16)
    assert 2.5e-3 <= allowed < 3e-3
    assert abs(scale_of(1.01 * oracle, oracle) - scale_of(single, oracle)) > 3 * allowed
    assert allowed_scale(single[:4], single[:4], oracle[:4], 4, 4, torch.bfloat16) > 4 * U
    assert scale_of(torch.ones(3), torch.zeros(3)) == 1.0
    noise = oracle + 0.1 * oracle.flip(0)
    noisy = allowed_scale(noise, noise, oracle, 4096, 4, torch.bfloat16)
    assert noisy > 0.064  # where errors are of ten per cent, one per cent is none
    again = Spread(torch.zeros_like(oracle), torch.zeros_like(oracle), 0.0)
    factor, independent = 1.01 * oracle, oracle + 0.01 * oracle.flip(0)
    for elements, tells in ((16, False), (4096, True)):
        few = (single[:elements], oracle[:elements], elements, 4, torch.bfloat16, again)
        assert (abs(scale_of(factor[:elements], few[1]) - 1) > allowed_scale(factor[:elements], *few)) is tells
        assert abs(scale_of(independent[:elements], few[1]) - 1) < allowed_scale(independent[:elements], *few)


def test_a_session_measures_how_near_to_its_bound_every_check_came() -> None:
    case = Case(LOSS.name, LOSS_CONFIG, 4, seed=3, dtype="bfloat16")
    clean = Session(LOSS, measure=True)
    assert clean.run(case) == () and clean.run(dataclasses.replace(case, dtype="float64")) == ()
    assert {dtype for _, dtype in clean.largest} == {"float64", "bfloat16"}
    assert 0 < max(clean.largest.values()) < 1
    wrong = Session(bent(LOSS, VocabParallelCrossEntropy, ScaledLoss), measure=True)
    found = wrong.run(case)
    assert {violation.check for violation in found} == {check for (check, _), ratio in wrong.largest.items() if ratio > 1}
    assert Session(LOSS).run(case) == ()


def test_a_case_that_cancels_is_looked_at_again() -> None:
    # One output element, the sum of eight terms: sooner or later they nearly cancel, and each rank's rounding is larger than the sum.
    config = RowParallelLinearConfig(in_features=8, out_features=1, bias=False)
    session = Session(ROW)
    looks: list[tuple[bool, bool]] = []
    traces: list[int] = []
    both, applied = session._both, session._apply

    def watched(case: Case, *, traced: int) -> Any:
        traces.append(traced)
        return both(case, traced=traced)

    def looked(comparisons: Any, largest: Any) -> Any:
        found = applied(comparisons, largest)
        looks.append((traces[-1] > 0, bool(found[0])))
        return found

    session._both, session._apply = watched, looked  # type: ignore[method-assign]
    for seed in range(60):
        assert session.run(Case(ROW.name, config, 8, seed=seed, dtype="bfloat16")) == ()
    assert (False, True) in looks and (True, False) in looks and (True, True) not in looks


def test_dtypes_are_drawn_as_asked_and_a_subject_may_know_some_only() -> None:
    result = tpv.verify(ROW, world_sizes=(1, 2), max_examples=30, dtypes=DTYPES)
    assert result.passed and set(result.dtypes) == set(DTYPES) and sum(result.dtypes.values()) == result.cases_run
    assert result.as_dict()["dtypes"] == result.dtypes
    choosy = dataclasses.replace(ROW, dtypes=("float64", "float32"))
    assert set(tpv.verify(choosy, world_sizes=(2,), max_examples=20, dtypes=("float32", "bfloat16")).dtypes) == {"float32"}
    with pytest.raises(
        tpv.CaseError, match=r"Expected a dtype that row_parallel_linear can run in \(float64, float32\) but got dtypes=bfloat16"
    ):
        tpv.verify(choosy, dtypes=("bfloat16",))
    with pytest.raises(tpv.CaseError, match="got dtype='bfloat'; did you mean bfloat16"):
        tpv.verify(ROW, dtypes=("bfloat",))


def test_a_case_says_in_which_dtype_and_the_narrower_of_it_and_precision_counts() -> None:
    text = repr(Case(ROW.name, ROW_CONFIG, 2, dtype="float16"))
    assert text.endswith("world_size=2, dtype='float16')") and read_case(text)[1].dtype == "float16"
    assert "dtype" not in repr(Case(ROW.name, ROW_CONFIG, 2))
    with pytest.raises(tpv.CaseError, match="Expected one of float64, float32, bfloat16, float16 but got dtype='half'"):
        Case(ROW.name, ROW_CONFIG, 2, dtype="half")
    single = dataclasses.replace(ROW, precision=torch.float32)
    assert [single.working_dtype(dtype) for dtype in DTYPES] == [torch.float32, torch.float32, torch.bfloat16, torch.float16]


def test_a_reference_that_cannot_run_in_a_dtype_is_an_error_that_says_so() -> None:
    class Picky(nn.Linear):
        """Only float64."""

        def forward(self, x: Tensor) -> Tensor:
            """Multiplies by a constant matrix of float64."""
            return super().forward(x) @ torch.eye(6, dtype=torch.float64)

    subject = dataclasses.replace(ROW, reference=lambda c: Picky(c.in_features, c.out_features))
    with pytest.raises(tpv.SubjectError, match=r"see Subject.precision and Subject.dtypes"):
        violations(subject, ROW_CONFIG, 2, "bfloat16")
