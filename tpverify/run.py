"""What one execution of a case produced, rank by rank: the only thing checks look at."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tpverify.case import Case
from tpverify.errors import SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.low_precision import Spread
from tpverify.sharding import Layout
from tpverify.subjects.subject import Subject


@dataclass(frozen=True)
class Placed:
    """One rank's part of a logical tensor.

    Attributes:
        local: the rank's tensor; None where the code under test left none (no gradient, no such parameter on this rank).
        layout: how the local parts make up the logical tensor.
    """

    local: torch.Tensor | None
    layout: Layout


@dataclass(frozen=True)
class ModuleCall:
    """The tensors that one call of a submodule took and returned, by position; None where it was not tensors only.

    Attributes:
        input_gradients: what this call contributes to the gradient of each input; None where backward did not reach it.
        output_gradients: the gradient of each output, all of its uses together. Both are filled by backward.
    """

    inputs: tuple[torch.Tensor, ...] | None
    outputs: tuple[torch.Tensor, ...] | None
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)
    output_gradients: list[torch.Tensor | None] = field(default_factory=list)


@dataclass
class RankRun:
    """What one rank of the TP group produced.

    Attributes:
        outputs: by label: ``output``, or ``output[0]``, ``output[key]`` for structures; ``output (call 2)`` from the second call on.
        input_gradients: by input name, ``x (call 2)`` from the second call on; inputs that require a gradient only.
        parameters: values by parameter name after the run: as the harness loaded them, if the module does not change them.
        parameter_gradients: by parameter name, after ``finalize_gradients``; a tied parameter stands under each of its names.
        ties: groups of parameter names that are one and the same parameter object.
        changed_inputs: names of the inputs that the module wrote to.
        changed_outputs: labels of the outputs that had another value when their backward was done than when forward returned.
        buffers: by name, the module's buffers after the run; of the reference, those that it changed.
        calls: traced runs only: the first call of every submodule in the traced call, by path, in order of the calls' starts.
    """

    outputs: dict[str, Placed] = field(default_factory=dict)
    input_gradients: dict[str, Placed] = field(default_factory=dict)
    parameters: dict[str, Placed] = field(default_factory=dict)
    parameter_gradients: dict[str, Placed] = field(default_factory=dict)
    ties: tuple[tuple[str, ...], ...] = ()
    changed_inputs: tuple[str, ...] = ()
    changed_outputs: tuple[str, ...] = ()
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, ModuleCall] = field(default_factory=dict)


@dataclass
class Run:
    """One execution: the reference (one rank) or one TP group.

    Attributes:
        ranks: by rank within the TP group; empty when the run failed.
        ledger: every collective issued by this TP group's ranks, in order of issue.
        beyond: the collectives of its ranks on groups that hold other ranks as well.
        error: why the run did not finish, or None.
        inputs: the logical inputs, by name; ``x (call 2)`` from the second call on.
        uses: reference only: the gradient of each use of a tied parameter, by the name under which it is used.
        replayed: traced reference only: what its submodules return for the parallel module's inputs, by path.
        oracle: reference in half precision only: what it produces in float64 from the same values.
        spread: traced reference in half precision only: how far runs from values that are off by a rounding are apart, by label.
        exact: reference in half precision only: whether all its sums of small integers are exact, in any order.
        random: reference only: whether its forward drew random numbers, as dropout does.
        sensitivity: traced reference only: how far each tensor moves, relative to itself, when all values are off by a rounding.
        depth: reference only: number of operations that follow one another, for the tolerance.
        terms: reference only: length of the longest sum, for the tolerance.
    """

    ranks: list[RankRun]
    ledger: Ledger
    error: SimulationError | None = None
    beyond: Ledger = field(default_factory=lambda: Ledger(()))
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    uses: dict[str, torch.Tensor] = field(default_factory=dict)
    replayed: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    oracle: RankRun | None = None
    spread: dict[str, Spread] = field(default_factory=dict)
    exact: bool = False
    random: bool = False
    sensitivity: dict[str, float] = field(default_factory=dict)
    depth: int = 1
    terms: int = 1


@dataclass(frozen=True)
class Comparison:
    """One case run both ways.

    Attributes:
        subject, case: what was run.
        reference: one rank that holds the logical tensors.
        parallel: one TP group.
        members: the group's global ranks, in group order.
    """

    subject: Subject
    case: Case
    reference: Run
    parallel: Run
    members: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which both sides compute."""
        return self.subject.working_dtype(self.case.dtype)
