"""Correct code that once looked wrong: each case cancels, overflows or rounds more than most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpverify as tpv
from tpverify.verification import check_case, read_case, typical_case

CASES = [
    # Logits near 1000 carry an absolute error of 1e-13, which exp makes a relative one.
    "Case('vocab_parallel_cross_entropy', VocabParallelCrossEntropyConfig(z_loss=0.01), world_size=1, seed=143, values='spike')",
    # The table that the first call looks up is another one than at the end.
    "Case('vocab_parallel_embedding', VocabParallelEmbeddingConfig(vocab=2), world_size=2, seed=1, values='integers', calls='twice')",
    # All tokens are equal, and so are their errors, which are no noise then.
    "Case('attention', AttentionConfig(seq=3, hidden=9, heads=9, causal=False, bias=False, sequence_parallel=True), world_size=3, "
    "layout='expanded', dtype='bfloat16')",
    "Case('transformer_block', BlockConfig(seq=4, hidden=4, heads=2, causal=False, bias=False, sequence_parallel=True, ffn=2), "
    "world_size=2, layout='expanded', dtype='bfloat16')",
    "Case('attention', AttentionConfig(seq=4, batch=2, hidden=16, heads=16, kv_heads=2, causal=False, bias=False), world_size=4, "
    "layout='expanded', dtype='bfloat16')",
    # A DTensor of summands, whose gradient is whole on every rank.
    "Case('dtensor_linear', DTensorLinearConfig(batch=2, seq=5, in_features=2, style='row', input='partial', output='partial', "
    "local_output=False), world_size=2, seed=1)",
]


@pytest.mark.parametrize("text", CASES)
def test_no_wolf(text: str) -> None:
    assert check_case(*read_case(text)) == []


class Scaled(nn.Module):
    """Two outputs, of which one is no number in any case."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens] -> [tokens], []."""
        return self.factor * x * self.weight, (x - x).sum() / 0.0


class Recomputed(nn.Module):
    """A table and a head that are one parameter, with a forward that runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 3] -> the same."""
        result: Tensor = checkpoint(lambda x: self.head(self.table(x).tanh()), x, use_reentrant=False)
        return result


def replicated(reference: Callable[[Any], nn.Module], parallel: Callable[[Any], nn.Module], shape: tuple[int, ...]) -> tpv.Subject:
    """A subject whose ranks all do the same."""
    return tpv.Subject(
        name="replicated",
        reference=reference,
        parallel=parallel,
        configs=tpv.configs(unused=st.just(0)),
        inputs=lambda c: {"x": tpv.Input(shape)},
        placements={"*": tpv.Replicate()},
    )


def test_what_is_no_number_hides_nothing_else() -> None:
    right, wrong = (replicated(lambda c: Scaled(1.0), lambda c, f=f: Scaled(f), (3,)) for f in (1.0, 1.5))  # type: ignore[misc]
    case = typical_case(right, 2)
    assert check_case(right, case) == []
    assert {(violation.check, violation.tensor) for violation in check_case(wrong, case)} == {
        ("forward", "output[0]"),
        ("parameter-gradient", "weight.grad"),
    }


class Places(nn.Module):
    """Where the largest numbers are, counted from 1; times a factor, or backwards."""

    def __init__(self, factor: int, backwards: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.factor, self.backwards = factor, backwards

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, 8] -> [tokens, 8], [tokens, 8] of int64."""
        places = (x.argsort(-1) + 1) * self.factor
        return x * self.weight, places.flip(-1) if self.backwards else places


def test_ids_are_no_multiples_of_each_other_but_may_stand_elsewhere() -> None:
    doubled, turned = (replicated(lambda c: Places(1, False), lambda c, b=b: Places(*b), (3, 8)) for b in ((2, False), (1, True)))  # type: ignore[misc]
    (found,) = check_case(doubled, typical_case(doubled, 2))
    assert (found.tensor, found.diagnosis) == ("output[1]", "")
    (found,) = check_case(turned, typical_case(turned, 2))
    assert "the right slices stand in another order along dimension 1" in found.diagnosis


def test_a_reference_may_run_forward_again_in_backward() -> None:
    subject = replicated(lambda c: Recomputed(), lambda c: Recomputed(), (2, 3))
    assert check_case(subject, replace(typical_case(subject, 2), calls="twice")) == []


def test_failures_in_single_precision_are_explained() -> None:
    text = (
        "Case('tpverify.mutants:positions_added_before_the_sum', LanguageModelConfig(hidden=4, heads=2, kv_heads=2, bias=False, ffn=2, "
        "tied=False), world_size=2, dtype='float32')"
    )
    assert any("rows of position.weight" in violation.diagnosis for violation in check_case(*read_case(text)))


def test_uneven_parts_are_not_calls_out_of_order() -> None:
    def program() -> list[float]:
        rank, received = dist.get_rank(), []
        for sent, taken in ((2, [2, 1]), (1, [1, 2])) if rank == 0 else ((1, [2, 1]), (2, [1, 2])):
            out = torch.empty(sum(taken))
            dist.all_to_all_single(out, torch.full((2 * sent,), float(rank)), taken, [sent, sent])
            received.append(float(out.sum()))
        return received

    assert tpv.simulate(program, world_size=2).results == [[1.0, 2.0], [1.0, 2.0]]
