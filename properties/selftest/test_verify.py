"""What honest but unusual modules come to: held where they are right, one clear violation where they are not."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bent_subjects import (
    Parallel,
    Reference,
    Single,
    SingleWithCast,
    Sizes,
    Tied,
    Untied,
    bent,
    broken,
    found,
    parallel,
    replicated,
    right,
    verified,
    with_output,
)
from hypothesis import strategies as st
from torch import Tensor, nn

import tpverify as tpv
from tpverify import strategies, verification
from tpverify.options import WORLD_VARIABLE
from tpverify.processes.world import process_world
from tpverify.subjects.mappings import reduce_from_region


@dataclass
class Output:
    """An output as a plain dataclass."""

    logits: Tensor
    hidden: Tensor | None = None


class ModelOutput(collections.OrderedDict[str, Any]):
    """An output as model libraries have it."""


GRADIENTS = [("input-gradient", "x.grad"), ("parameter-gradient", "weight.grad")]
FORMS = {
    "dict": lambda y: {"logits": y, "hidden": (y * 2, None), "count": 3},
    "ordered dict": lambda y: ModelOutput(logits=y, hidden=y * 2),
    "dataclass": lambda y: Output(y, y * 2),
    "list": lambda y: [y, [y * 2]],
    "integers": lambda y: (y, torch.arange(3)),
    "booleans": lambda y: (y, y.detach() > 0),
    "detached": lambda y: y.detach(),
    "one of two detached": lambda y: (y, y.detach() * 2),
    "complex": lambda y: torch.complex(y, y * 2).abs(),
    "empty": lambda y: y[:0],
    "scalar": lambda y: y.sum(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_output_may_have_any_form_and_an_error_in_it_is_found(form: Any) -> None:
    assert verified(with_output(form), max_examples=5).passed
    wrong = broken(with_output(form, parallel=lambda y: form(y * 2 + 1)))
    assert any(violation.check == "forward" for violation in wrong) == (form is not FORMS["empty"])


@pytest.mark.parametrize(
    ("wrong", "label", "says"),
    [
        (lambda y: (y, torch.arange(3) + 1), "output[1]", "expected 0 but got 1"),
        (lambda y: (y, torch.arange(4)), "output[1]", "the local shape (3,) but got (4,)"),
        (lambda y: y, "output", "Expected the outputs output[0], output[1] but got output"),
        (lambda y: (y, torch.arange(3), y), "output", "but got output[0], output[1], output[2]"),
        (lambda y: (None, None), "output", "but got none"),
    ],
)
def test_what_is_wrong_with_an_output_is_said_once_for_all_ranks(wrong: Any, label: str, says: str) -> None:
    violations = broken(with_output(FORMS["integers"], parallel=wrong))
    violation = next(violation for violation in violations if violation.tensor == label)
    assert (violation.check, violation.ranks) == ("forward", (0, 1))
    assert says in violation.message


def test_an_output_without_history_on_one_side_only_is_found_by_its_gradients() -> None:
    lost = with_output(lambda y: y, parallel=lambda y: y.detach())
    assert found(broken(lost)) == GRADIENTS
    extra = with_output(lambda y: y.detach(), parallel=lambda y: y)
    assert found(broken(extra)) == GRADIENTS
    assert "Expected x.grad to be None as in the reference" in broken(extra)[0].message


@pytest.mark.parametrize("module", [Single, SingleWithCast])
def test_float32_is_held_where_it_is_declared(module: type[nn.Module]) -> None:
    assert verified(bent(parallel=module, precision=torch.float32), max_examples=40, world_sizes=(1, 2, 3, 4)).passed


def test_float32_that_is_not_declared_is_pointed_to() -> None:
    cast = broken(bent(parallel=SingleWithCast))
    assert {check for check, _ in found(cast)} == {"forward", "input-gradient", "parameter-gradient"}
    assert {violation.diagnosis for violation in cast} == {
        "torch.float32 rounding fits this: if the code is meant to compute in it, the subject needs precision=torch.float32"
    }
    hard = broken(bent(parallel=Single))
    assert found(hard) == [("execution", "")]
    assert hard[0].diagnosis == "modules are built and run in torch.float64: the subject's precision changes that"
    with pytest.raises(tpv.SubjectError, match=r"inputs are torch\.float64: see Subject\.precision"):
        broken(bent(reference=lambda c: Reference(c).float()))


def test_float32_does_not_excuse_a_bug() -> None:
    wrong = broken(parallel(lambda self, x: F.linear(x, self.weight) * 2, precision=torch.float32))
    assert {check for check, _ in found(wrong)} >= {"forward", "input-gradient"}
    assert "rounding" not in wrong[0].diagnosis


def test_exact_arithmetic_that_rounds_is_named_as_such() -> None:
    thirds = bent(reference=_scaled_reference, parallel=_scaled_parallel)
    first = broken(thirds, values="integers")[0]
    assert first.diagnosis == "torch.float64 rounding fits this: exact=True promises arithmetic without rounding on small integers"
    assert broken(thirds) == []
    assert verified(bent(reference=_scaled_reference, parallel=_scaled_parallel, exact=False)).passed


def _scaled_reference(c: Sizes) -> Any:
    return type("Scaled", (Reference,), {"forward": lambda self, x: Reference.forward(self, x) / 3})(c)


def _scaled_parallel(c: Sizes) -> Any:
    return type("Scaled", (Parallel,), {"forward": lambda self, x: Parallel.forward(self, x / 3)})(c)


def test_parameters_tied_on_one_side_only() -> None:
    assert verified(replicated(Tied, Tied)).checks["tied"] == 10
    assert broken(replicated(Untied, Untied)) == []
    untied = broken(replicated(Tied, Untied))
    assert ("tied", "first.weight") in found(untied)
    assert "to be one parameter, as in the reference" in message(untied, "tied", "first.weight")
    tied = broken(replicated(Untied, Tied))
    assert "to be separate, as in the reference, but they are one parameter" in message(tied, "tied", "first.weight")


def message(violations: list[tpv.Violation], check: str, tensor: str) -> str:
    """What is said about one failure."""
    return next(v.message for v in violations if (v.check, v.tensor) == (check, tensor))


def frozen(base: type[nn.Module]) -> type[nn.Module]:
    """``base`` with its weight frozen."""

    def init(self: Any, c: Sizes) -> None:
        base.__init__(self, c)
        self.weight.requires_grad_(False)

    return type(base.__name__, (base,), {"__init__": init})


def test_frozen_parameters() -> None:
    assert broken(bent(reference=frozen(Reference), parallel=frozen(Parallel))) == []
    assert found(broken(bent(parallel=frozen(Parallel)))) == [("parameter-gradient", "weight.grad")]
    trained = broken(bent(reference=frozen(Reference)))
    assert "Expected weight.grad to be None as in the reference" in trained[0].message


def buffered(base: type[nn.Module], value: float) -> type[nn.Module]:
    """``base`` that multiplies by a buffer."""

    def init(self: Any, c: Sizes) -> None:
        base.__init__(self, c)
        self.register_buffer("scale", torch.full((c.out,), value))

    return type(base.__name__, (base,), {"__init__": init, "forward": lambda self, x: base.forward(self, x) * self.scale})


def test_buffers_are_the_modules_own() -> None:
    assert broken(bent(reference=buffered(Reference, 2.0), parallel=buffered(Parallel, 2.0))) == []
    assert broken(bent(reference=buffered(Reference, 2.0), parallel=buffered(Parallel, 3.0))) != []


def test_a_random_reference_is_named_where_results_differ() -> None:
    both = with_output(lambda y: F.dropout(y, 0.5))
    assert verified(both, max_examples=20).passed  # the same draws on every rank
    only = broken(with_output(lambda y: F.dropout(y, 0.5), parallel=lambda y: y))
    assert only[0].diagnosis.startswith("the reference draws random numbers in forward, as dropout does")
    wrong = broken(with_output(lambda y: y, parallel=lambda y: y * 3))
    assert "random" not in wrong[0].diagnosis


def test_a_module_that_writes_into_its_input_spoils_nothing_but_its_own_rank() -> None:
    def spoil(module: Parallel, x: Tensor) -> Tensor:
        output = reduce_from_region(F.linear(x, module.weight), module.group)
        x.data.zero_()
        return output

    assert found(broken(parallel(spoil))) == [("parameter-gradient", "weight.grad"), ("buffers", "")]

    def spoil_on_rank_1(module: Parallel, x: Tensor) -> Tensor:
        output = reduce_from_region(F.linear(x, module.weight), module.group)
        if dist.get_rank() == 1:
            x.data.zero_()
        return output

    violations = broken(parallel(spoil_on_rank_1))
    assert [(violation.check, violation.ranks) for violation in violations] == [("parameter-gradient", (1,)), ("buffers", (1,))]


class SumReference(nn.Module):
    """No parameters."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """[seq, features] -> [seq]."""
        return x.sum(-1)


class SumParallel(SumReference):
    """No parameters, one reduction."""

    def forward(self, x: Tensor) -> Tensor:
        """[seq, features / world_size] -> [seq]."""
        return reduce_from_region(x.sum(-1), tpv.tp_group())


def test_a_module_without_parameters() -> None:
    result = verified(bent(reference=SumReference, parallel=SumParallel, placements=None))
    assert (result.passed, result.checks["parameter-gradient"], result.checks["input-gradient"]) == (True, 0, 10)
    assert broken(bent(reference=SumReference, parallel=SumReference, placements=None)) != []


def refusing(error: type[Exception]) -> Any:
    """A parallel module that refuses a sequence of 2."""

    def build(c: Sizes) -> nn.Module:
        if c.seq == 2:
            raise error(f"Expected a sequence other than 2 but got seq={c.seq}")
        return Parallel(c)

    return build


def test_refusal_must_be_declared_and_declared_refusal_must_come() -> None:
    declared: Any = {"rejects": lambda c, world_size: c.seq == 2}
    good = verified(bent(parallel=refusing(ValueError), **declared))
    assert good.passed
    assert 0 < good.rejected < good.cases_run
    refused = Sizes(seq=2, features=2)
    unplaced = bent(parallel=refusing(ValueError), **declared, placements=lambda c: {"weight": tpv.Shard(1 if c.seq != 2 else 1 // 0)})
    assert broken(unplaced, refused) == []
    silent = broken(bent(**declared), refused)
    assert found(silent) == [("rejection", "")]
    assert silent[0].message == "Expected Sizes(seq=2, features=2) to be refused with a ValueError on 2 ranks but no rank refused it"
    assert found(broken(bent(parallel=refusing(AssertionError), **declared), refused)) == [("rejection", "")]
    assert found(broken(bent(parallel=refusing(ValueError)), refused)) == [("execution", "")]


def test_the_default_group_is_the_wrong_one_where_two_tp_groups_share_a_world() -> None:
    def forward(module: Parallel, x: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        return reduce_from_region(F.linear(x, module.weight), dist.group.WORLD)

    assert verified(parallel(forward), max_examples=40, checks=("forward",)).violations[0].case.endswith("groups='blocks')")
    first = broken(parallel(forward), groups="strided")[0]
    assert (first.check, first.tensor) == ("forward", "output")
    assert "(the TP group of global ranks 0, 2)" in first.message
    assert verified(parallel(forward, subgroups=False), max_examples=40).passed
    by_world: Any = type("ByWorld", (Parallel,), {"__init__": _cut_by_world})
    with pytest.raises(tpv.SubjectError, match=r"two TP groups share the world here: does every module use tpverify\.tp_group\(\)"):
        broken(bent(parallel=by_world), groups="strided")


def _cut_by_world(self: Any, c: Sizes) -> None:
    Parallel.__init__(self, c)
    self.weight = nn.Parameter(torch.empty(c.out, c.features // dist.get_world_size()))


def test_sizes_may_be_zero_and_ranks_many() -> None:
    assert verified(bent(configs=st.just(Sizes(seq=0, features=2, out=0)))).passed
    assert verified(right, world_sizes=(8,), max_examples=5).world_sizes == {8: 5}
    assert verified(right, world_sizes=(4, 2, 2, 1), max_examples=40).world_sizes.keys() == {1, 2, 4}


def test_communication_may_be_left_open() -> None:
    assert broken(bent(communication=lambda c, world_size: None)) == []
    assert [violation.check for violation in broken(bent(communication=lambda c, world_size: []))] == ["communication"]


def test_only_the_checks_asked_for_are_applied() -> None:
    wrong = with_output(lambda y: y, parallel=lambda y: y * 3)
    assert {check for check, _ in found(verified(wrong, checks=("input-gradient",), max_examples=2).violations)} == {"input-gradient"}
    assert verified(wrong, checks=("vocabulary",), max_examples=2).violations == ()


def state() -> tuple[Any, ...]:
    """What a process must find as it left it."""
    generators = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    threads = sorted(thread.name for thread in threading.enumerate())
    return torch.get_default_dtype(), generators, threads, dict(os.environ), dist.is_initialized(), torch.is_grad_enabled()


@pytest.mark.parametrize("subject", [right, parallel(lambda self, x: 1 / 0), bent(placements=None)], ids=["held", "violated", "usage"])
def test_a_verification_leaves_the_process_as_it_was(subject: tpv.Subject) -> None:
    verified(right, max_examples=1)
    before = state()
    with contextlib.suppress(tpv.SubjectError):
        verified(subject, max_examples=3)
    assert state() == before
    torch.set_default_dtype(torch.float16)
    try:
        assert state() != before
        assert verified(right, max_examples=3).passed
        assert torch.get_default_dtype() is torch.float16
    finally:
        torch.set_default_dtype(torch.float32)


def test_property_tests_draw_no_more_ranks_than_their_world_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    drawn = strategies.cases

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(options["most_ranks"])
        return drawn(*args, **options)

    monkeypatch.setattr(verification, "cases", watched)
    tpv.property_test(right)
    monkeypatch.setenv(WORLD_VARIABLE, "gloo")
    tpv.property_test(right)
    assert seen == [None, process_world("gloo").most_ranks]
