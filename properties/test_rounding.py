"""Monte Carlo arithmetic: every operation rounds, nothing else changes; and correct cases that a run without it mistook."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tpverify import sensitivity
from tpverify.lookup import read_case
from tpverify.rounding import RandomRounding
from tpverify.session import Session

R = 2.0**-10

ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum().reshape(1),
    "product": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "copy": lambda x: x.clone(),
}
LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1)[1:].reshape(3, 5),
    "transposed": lambda x: x.t(),
    "in place": lambda x: x.add_(1),
    "comparison": lambda x: x > 0,
    "places": lambda x: x.argmax(-1),
}


def drawn() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ROUNDED)
def test_a_result_is_off_by_one_rounding_up_or_down(name: str) -> None:
    function = ROUNDED[name]
    x = drawn()
    expected = function(x)
    with RandomRounding(0, R):
        found = function(x)
    off = (found / expected - 1).abs()
    assert torch.allclose(off, torch.full_like(off, R), rtol=1e-6)
    if expected.numel() > 8:
        assert 0 < ((found / expected) > 1).sum() < expected.numel()


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_new_number_is_left_alone(name: str) -> None:
    x, y = torch.arange(16, dtype=torch.float64).view(4, 4), torch.arange(16, dtype=torch.float64).view(4, 4)
    function = (lambda t: t.view(-1)[1:16].view(3, 5)) if name == "view" else LEFT[name]
    with RandomRounding(0, R):
        found = function(x)
    assert torch.equal(found, function(y))
    assert torch.equal(x, y)


def test_backward_rounds_too_and_a_seed_decides_how() -> None:
    def gradient(seed: int | None) -> Tensor:
        x = drawn().requires_grad_()
        outputs = (x.exp() * x).sum()
        if seed is None:
            torch.autograd.backward(outputs)
        else:
            with RandomRounding(seed, R):
                torch.autograd.backward(outputs)
        assert x.grad is not None
        return x.grad

    exact = gradient(None)
    assert torch.equal(gradient(5), gradient(5))
    assert not torch.equal(gradient(5), gradient(6))
    off = (gradient(5) / exact - 1).abs()
    assert 0 < float(off.max()) < 0.1 and float(off.min()) > 0


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
    monkeypatch.setattr(sensitivity, "RandomRounding", lambda seed, relative: RandomRounding(seed, 0.0))
    found = Session(subject).run(case)
    assert [violation.check for violation in found] == ["parameter-gradient"], "expected a case that tells"


def test_a_reference_that_does_not_let_itself_be_rounded_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(RandomRounding):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, *_: object, **__: object) -> None:
            raise NotImplementedError("no rule for this operation")

    subject, case = read_case(MISTAKEN[0])
    monkeypatch.setattr(sensitivity, "RandomRounding", Refusing)
    assert [violation.check for violation in Session(subject).run(case)] == ["parameter-gradient"]
