"""Monte Carlo arithmetic: every operation rounds, nothing else changes; and correct cases that a run without it mistook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpverify as tpv
from tpverify import sensitivity
from tpverify.case import Case
from tpverify.lookup import read_case
from tpverify.rounding import ONE_IN, RandomRounding
from tpverify.session import Session

ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum().reshape(1),
    "product": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "copy": lambda x: x.clone(),
}
LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1)[1:].view(3, 5),
    "transposed": lambda x: x.t(),
    "in place": lambda x: x.add_(1),
    "comparison": lambda x: x > 0,
    "places": lambda x: x.argmax(-1),
    "unmarked views": lambda x: torch.unsafe_chunk(x, 2)[1],
}


def drawn() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUNDED)
def test_one_result_in_six_is_off_by_its_last_digit(name: str, dtype: torch.dtype) -> None:
    x, function = drawn().to(dtype), ROUNDED[name]
    expected = function(x).double()
    with RandomRounding(0):
        results = [function(x) for _ in range(200)]
    off = torch.stack([result.double() / expected - 1 for result in results]) / torch.finfo(dtype).eps
    for sign in (1, -1):
        assert ((off * sign > 0.4) & (off * sign < 2.1)).double().mean() == pytest.approx(1 / ONE_IN, abs=0.06)
    assert (off == 0).double().mean() == pytest.approx(1 - 2 / ONE_IN, abs=0.1)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_new_number_is_left_alone(name: str) -> None:
    x, y = torch.arange(16, dtype=torch.float64).view(4, 4), torch.arange(16, dtype=torch.float64).view(4, 4)
    with RandomRounding(0, 2**40):
        found = LEFT[name](x)
    assert torch.equal(found, LEFT[name](y))
    assert torch.equal(x, y)


def test_backward_rounds_too_and_a_seed_decides_how() -> None:
    def gradient(rounding: RandomRounding | None) -> Tensor:
        x = drawn().requires_grad_()
        outputs = (x.exp() * x).sum()
        with rounding or contextlib.nullcontext():
            torch.autograd.backward(outputs)
        assert x.grad is not None
        return x.grad

    exact = gradient(None)
    assert torch.equal(gradient(RandomRounding(5)), gradient(RandomRounding(5)))
    assert not torch.equal(gradient(RandomRounding(5)), gradient(RandomRounding(6)))
    assert torch.equal(gradient(RandomRounding(5, 0)), exact)
    assert 0 < float((gradient(RandomRounding(5)) / exact - 1).abs().max()) < 1e-14


def test_operations_in_a_wider_dtype_round_by_its_digits() -> None:
    positions = torch.arange(4000, dtype=torch.float32)
    with RandomRounding(0):
        angles = (positions * 0.5).sin()
    assert float((angles - (positions * 0.5).sin()).abs().max()) < 1e-3


def test_sparse_tensors_are_left_alone() -> None:
    ids, table = torch.tensor([1, 1, 3]), drawn().requires_grad_()
    with RandomRounding(0):
        torch.autograd.backward(nn.functional.embedding(ids, table, sparse=True).sum())
    assert table.grad is not None and table.grad.is_sparse
    assert table.grad.to_dense()[:, 0] == pytest.approx([0, 2, 0, 1], rel=1e-12)


def test_forward_mode_and_its_zeros_are_left_alone() -> None:
    def tangent() -> Tensor:
        weight = drawn()
        return torch.func.jvp(lambda x: (x @ weight).tanh(), (drawn(),), (torch.ones(4, 4, dtype=torch.float64),))[1]

    with RandomRounding(0):
        found = tangent()
    assert torch.allclose(found, tangent(), rtol=1e-12)


MISTAKEN = [
    "Case('gpt', LanguageModelConfig(seq=2, hidden=8, heads=2, kv_heads=2, bias=False, vocab=4, positions=2, tied=False), "
    "world_size=1, seed=11934138, values='edges', dtype='bfloat16')",
    "Case('bert', LanguageModelConfig(seq=3, hidden=8, heads=2, kv_heads=2, causal=False, bias=False, ffn=2, "
    "arrangement='normalized_residual', vocab=8, layers=2, positions=3, reduction='mean'), world_size=2, seed=4294967295, "
    "values='repeated', dtype='bfloat16')",
    "Case('bert', LanguageModelConfig(seq=2, batch=2, hidden=12, heads=4, kv_heads=4, causal=False, ffn=12, activation='swiglu', "
    "vocab=12, layers=2, positions=2, tied=False), world_size=4, seed=54168, values='repeated', dtype='bfloat16')",
]
"""Tokens repeat, so the gradients of queries and keys are differences of equal numbers; the reference's come out by luck."""


@pytest.mark.parametrize("text", MISTAKEN)
def test_a_gradient_that_cancels_by_luck_is_not_held_against_correct_code(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, case = read_case(text)
    assert Session(subject).run(case) == ()
    monkeypatch.setattr(sensitivity, "RandomRounding", lambda seed: RandomRounding(seed, 0))
    found = Session(subject).run(case)
    assert [violation.check for violation in found] == ["parameter-gradient"], "expected a case that tells"


def test_a_reference_that_does_not_let_itself_be_rounded_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(RandomRounding):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, *_: object, **__: object) -> None:
            raise NotImplementedError("no rule for this operation")

    subject, case = read_case(MISTAKEN[0])
    monkeypatch.setattr(sensitivity, "RandomRounding", Refusing)
    assert [violation.check for violation in Session(subject).run(case)] == ["parameter-gradient"]


class Smoothed(nn.Module):
    """Cross-entropy with smoothed targets; ``forgets`` them in the value, not in the gradient."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[tokens, vocab], [tokens] -> [tokens]."""
        plain, smooth = (nn.functional.cross_entropy(logits, targets, label_smoothing=eps, reduction="none") for eps in (0.0, 0.1))
        return smooth + (plain - smooth).detach() if self.forgets else smooth


class Rotated(nn.Module):
    """Features turned by their token's position, whose angles are computed in float32; ``scale`` is the last rank's."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, features] -> the same."""
        last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        positions = torch.arange(len(x), dtype=torch.float32)[:, None] * (self.scale if last else 1.0)
        return x * positions.cos().to(x.dtype) + x.roll(1, 1) * positions.sin().to(x.dtype)


def both(name: str, reference: Callable[[], nn.Module], parallel: Callable[[], nn.Module], inputs: dict[str, tpv.Input]) -> tpv.Subject:
    return tpv.Subject(
        name=name,
        reference=lambda c: reference(),
        parallel=lambda c: parallel(),
        configs=tpv.configs(size=1),
        inputs=lambda c: inputs,
    )


def smoothed(forgets: bool) -> tpv.Subject:
    inputs = {"logits": tpv.Input((12, 6)), "targets": tpv.Input((12,), kind="integers", high=6)}
    return both("smoothed", lambda: Smoothed(False), lambda: Smoothed(forgets), inputs)


def rotated(scale: float) -> tpv.Subject:
    inputs = {"x": tpv.Input((24, 4))}
    return both("rotated", Rotated, lambda: Rotated(scale), inputs)


@pytest.mark.parametrize(
    ("right", "wrong", "dtype"),
    [(smoothed(False), smoothed(True), "float16"), (rotated(1.0), rotated(1.05), "bfloat16")],
    ids=["smoothing forgotten in the value", "positions 5 % off"],
)
def test_what_rounding_at_random_does_not_excuse(
    right: tpv.Subject, wrong: tpv.Subject, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [Case(wrong.name, tpv.Config(size=1), 2 + seed % 2, seed=seed, dtype=dtype) for seed in range(1, 13)]

    def caught(subject: tpv.Subject) -> list[int]:
        return [case.seed for case in cases if "forward" in {violation.check for violation in Session(subject).run(case)}]

    assert caught(right) == []
    found = caught(wrong)
    monkeypatch.setattr(sensitivity, "RandomRounding", lambda seed: RandomRounding(seed, 0))
    assert found == caught(wrong) != []
