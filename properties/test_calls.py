"""More than one call of a module: what is right once and wrong from then on, and what is right however often it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import broken_checks
from torch import Tensor, nn

import tpverify as tpv
from tpverify.case import CALLS, Case, call_label, without_call
from tpverify.processes.world import ProcessWorld
from tpverify.runner import run_both
from tpverify.sharding import Replicate, Shard
from tpverify.strategies import cases
from tpverify.subjects.subject import Collective, Input, Subject
from tpverify.verification import builtin_subjects, read_case, typical_case

AGAIN = [calls for calls in CALLS if calls != "once"]
SUBJECTS = ["column_parallel_linear", "row_parallel_linear", "mlp", "vocab_parallel_embedding", "vocab_parallel_cross_entropy", "gpt"]


@dataclass(frozen=True)
class Sizes:
    """A linear layer on a sequence of ``seq`` on every rank."""

    seq: int = 2
    features: int = 12


class GatherOnce(nn.Module):
    """A column-parallel first layer on a sharded sequence, which needs no gradient: gathered anew in every call."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.features // dist.get_world_size(), 3))
        self.gathered: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        """[s / world_size, 3] -> [s, 3]."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        """[s / world_size, 3] -> [s, features / world_size]."""
        return F.linear(self.gather(x), self.weight)


class StaleCache(GatherOnce):
    """Keeps what it gathered first."""

    def forward(self, x: Tensor) -> Tensor:
        if self.gathered is None:
            self.gathered = self.gather(x)
        return F.linear(self.gathered, self.weight)


class LinearFromBuffer(torch.autograd.Function):
    """A linear layer that keeps its input out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x = x
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.T @ ctx.x


class SharedBuffer(GatherOnce):
    """Gathers into one buffer for all calls, and backward reads it there."""

    def forward(self, x: Tensor) -> Tensor:
        gathered = self.gather(x)
        self.gathered = gathered if self.gathered is None else self.gathered.copy_(gathered)
        return LinearFromBuffer.apply(self.gathered, self.weight)  # type: ignore[no-any-return]


class HookOnGradient(nn.Module):
    """A bias on a sharded sequence, whose gradient a hook sums over ranks before it is accumulated."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(3))
        self.install()

    def install(self) -> None:
        """The hook."""
        self.bias.register_hook(self.reduced)

    @staticmethod
    def reduced(gradient: Tensor) -> Tensor:
        """Summed over ranks."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total

    def forward(self, x: Tensor) -> Tensor:
        """[s / world_size, 3] -> the same."""
        return x + self.bias


class HookOnAccumulated(HookOnGradient):
    """Sums what has accumulated, which holds sums already."""

    def install(self) -> None:
        self.bias.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))


class HookWithFlag(HookOnGradient):
    """Sums the first gradient and believes that that was it."""

    done = False

    def install(self) -> None:
        self.bias.register_hook(self.once)

    def once(self, gradient: Tensor) -> Tensor:
        """Summed over ranks the first time."""
        before, self.done = self.done, True
        return gradient if before else self.reduced(gradient)


class Finalized(HookOnGradient):
    """Leaves the sum to ``finalize_gradients``."""

    def install(self) -> None:
        pass


class Twofold(nn.Module):
    """One tensor under two names."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """[s, 3] -> [s, 3]."""
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Bias(nn.Module):
    """The reference of the hooks."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> Tensor:
        """[s, 3] -> [s, 3]."""
        return x + self.bias


def sums(module: nn.Module) -> None:
    """Every gradient summed over ranks."""
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def gathering(parallel: Callable[[Sizes], nn.Module]) -> Subject:
    return Subject(
        name="gathering",
        reference=lambda c: nn.Linear(3, c.features, bias=False),
        parallel=parallel,
        configs=st.just(Sizes()),
        inputs=lambda c: {"x": Input((12 * c.seq, 3), placement=Shard(0), grad=False)},
        placements={"weight": Shard(0)},
        outputs=Shard(-1),
        communication=lambda c, w: [Collective("all_gather", "forward")],
    )


def hooked(parallel: Callable[[Sizes], nn.Module], phase: str = "backward", **changes: Any) -> Subject:
    return Subject(
        name="hooked",
        reference=Bias,
        parallel=parallel,
        configs=st.just(Sizes()),
        inputs=lambda c: {"x": Input((12 * c.seq, 3), placement=Shard(0))},
        placements={"bias": Replicate()},
        outputs=Shard(0),
        communication=lambda c, w: [Collective("all_reduce", phase)],
        **changes,
    )


def broken(subject: Subject, calls: str, world_size: int = 2) -> dict[str, set[str]]:
    """By check that does not hold, the tensors concerned."""
    found: dict[str, set[str]] = {}
    for violation in tpv.check_case(subject, Case(subject.name, Sizes(), world_size, calls=calls)):
        found.setdefault(violation.check, set()).add(violation.tensor)
    return found


RIGHT = [gathering(GatherOnce), hooked(HookOnGradient), hooked(Finalized, "optimizer", finalize_gradients=sums)]


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("subject", RIGHT, ids=["gather", "hook", "finalize"])
def test_what_is_right_in_every_call_passes(subject: Subject, calls: str) -> None:
    for world_size in (1, 2, 3):
        assert broken(subject, calls, world_size) == {}


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        (gathering(StaleCache), dict.fromkeys(AGAIN, ("forward", "output (call 2)"))),
        (gathering(SharedBuffer), {"interleaved": ("parameter-gradient", "weight.grad")}),
        (hooked(HookOnAccumulated), dict.fromkeys(AGAIN, ("parameter-gradient", "bias.grad"))),
        (hooked(HookWithFlag), dict.fromkeys(AGAIN, ("parameter-gradient", "bias.grad"))),
    ],
    ids=["stale cache", "shared buffer", "hook on the accumulated gradient", "flag that is never reset"],
)
def test_what_is_right_in_one_call_only_is_caught_in_two(subject: Subject, wrong: dict[str, tuple[str, str]]) -> None:
    for calls in CALLS:
        found = broken(subject, calls)
        if calls in wrong:
            check, tensor = wrong[calls]
            assert tensor in found[check] and "output" not in found.get("forward", ())
        else:
            assert found == {}


def test_a_bug_of_the_second_call_is_drawn_and_one_of_every_call_is_shown_in_one() -> None:
    second = tpv.verify(gathering(StaleCache), max_examples=60, seed=0)
    assert {"forward", "communication"} <= broken_checks(second)
    assert all("calls=" in violation.case for violation in second.violations)
    every = tpv.verify(replace(hooked(Finalized), communication=None), max_examples=60, seed=0)
    assert broken_checks(every) == {"parameter-gradient", "replication"}
    assert not any("calls=" in violation.case for violation in every.violations)


@pytest.mark.parametrize("calls", AGAIN)
@pytest.mark.parametrize("name", SUBJECTS)
def test_built_in_subjects_are_right_in_every_call(name: str, calls: str) -> None:
    subject = builtin_subjects()[name]
    seen = []

    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases(subject, (1, 2, 3)).map(lambda case: replace(case, calls=calls)))
    def holds(case: Case) -> None:
        assert tpv.check_case(subject, case) == []
        seen.append(case)

    holds()
    assert len(seen) >= 10


def test_the_uses_of_a_tied_parameter_are_summed_over_calls() -> None:
    subject = Subject(
        name="tied",
        reference=Twofold,
        parallel=Twofold,
        configs=st.just(Sizes()),
        inputs=lambda c: {"x": Input((c.seq, 3))},
        placements={"*": Replicate()},
    )
    for calls in CALLS:
        case = Case("tied", Sizes(), 2, calls=calls)
        assert tpv.check_case(subject, case) == []
        reference = run_both(subject, case)[0].reference
        gradient = reference.ranks[0].parameter_gradients["first.weight"].local
        torch.testing.assert_close(sum(reference.uses.values(), torch.zeros(())), gradient)


def test_calls_have_inputs_and_cotangents_of_their_own_and_the_first_ones_are_those_of_one_call() -> None:
    subject = hooked(HookOnGradient)
    one, two = (run_both(subject, Case("hooked", Sizes(), 2, calls=calls))[0].reference for calls in ("once", "twice"))
    assert list(two.inputs) == ["x", "x (call 2)"] and list(two.ranks[0].outputs) == ["output", "output (call 2)"]
    gradients = two.ranks[0].input_gradients
    for first, second in ((two.inputs["x"], two.inputs["x (call 2)"]), (gradients["x"].local, gradients["x (call 2)"].local)):
        assert first is not None and second is not None and not torch.equal(first, second)
    assert torch.equal(one.inputs["x"], two.inputs["x"])
    assert torch.equal(one.ranks[0].outputs["output"].local, two.ranks[0].outputs["output"].local)  # type: ignore[arg-type]


def test_labels_of_calls() -> None:
    assert [call_label("output[0]", call) for call in (0, 1)] == ["output[0]", "output[0] (call 2)"]
    assert without_call("x (call 2).grad") == "x.grad" and without_call("x") == "x"


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    world = ProcessWorld("gloo")
    yield world
    world.close()


@pytest.mark.parametrize("calls", AGAIN)
def test_processes_make_the_same_calls(world: ProcessWorld, calls: str) -> None:
    subject = builtin_subjects()["mlp"]
    drawn = replace(typical_case(subject, 2), calls=calls)
    simulated, real = (run_both(subject, drawn, world=where)[0].parallel for where in (None, world))
    assert real.error is None and len(real.ledger) == len(simulated.ledger)
    for ours, theirs in zip(simulated.ranks, real.ranks, strict=True):
        assert list(ours.outputs) == list(theirs.outputs) == [call_label("output", call) for call in range(drawn.call_count)]
        for label, placed in ours.outputs.items():
            torch.testing.assert_close(placed.local, theirs.outputs[label].local)
        for name, placed in ours.parameter_gradients.items():
            torch.testing.assert_close(placed.local, theirs.parameter_gradients[name].local)


def test_a_module_that_is_wrong_in_a_later_call_is_named() -> None:
    subject, case = read_case("Case('tpverify.mutants:weight_copy_kept', MLPConfig(ffn=2), world_size=2, calls='twice')")
    found = tpv.check_case(subject, case)
    assert ("forward", "fc2") in [(violation.check, violation.tensor) for violation in found]
    assert "if the module is called once only" in found[0].diagnosis
