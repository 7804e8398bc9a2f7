"""Holds the simulator against a backend: one program in the simulator, in recorded processes and in bare ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tpverify.conformance.bare import BareRank, BareWorld
from tpverify.conformance.comparison import PREFIX, Outcome, same_error_class, unequal_errors, unequal_ledgers, unequal_outputs
from tpverify.conformance.differences import COMPUTES, DIES, as_issued, without_differences
from tpverify.conformance.interpreter import DISAGREEMENTS
from tpverify.conformance.program import REDUCING, Program, Step
from tpverify.conformance.subject import case_of, programs
from tpverify.errors import RankError, RankTimeout
from tpverify.processes.world import process_world
from tpverify.runner import run_both
from tpverify.world import World

TIMEOUT = 20.0
FLIGHT_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32"}
FLIGHT_DTYPES |= {"Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64", "Float8_e4m3fn": "float8_e4m3fn"}


def outcome(program: Program, world: World | None = None) -> Outcome:
    """What a world makes of a program.

    Args:
        world: None = the simulator.
    """
    run = run_both(programs, case_of(program), TIMEOUT, world=world)[0].parallel
    outputs = [
        {
            label[len(PREFIX) : -1]: placed.local
            for label, placed in rank.outputs.items()
            if label.startswith(PREFIX) and placed.local is not None
        }
        for rank in run.ranks
    ]
    return Outcome(outputs, run.error, run.ledger)


@dataclass
class Count:
    """What has been compared.

    Attributes:
        seen: texts of the programs on which all worlds agree, without those of which no step is left.
        finished, refused, disagreeing: of those, how many ran to their end, were refused, or had ranks that do not agree.
        inexact: how many of those that finish differ within rounding.
        hung: how many times a backend did not come back from a program that it carries out when asked again. Gloo now and then, once in
            some thousand programs, misses the end of a send: all ranks are in the same collective, and each waits for the others.
        steps: how often each call was made by programs that finish.
        refusals: what was wrong with the others' last step.
        left_out: steps that were left out because they are known to differ, by difference.
        world_sizes: programs by world size.
    """

    finished: int = 0
    refused: int = 0
    disagreeing: int = 0
    inexact: int = 0
    hung: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    world_sizes: Counter[int] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    @property
    def programs(self) -> int:
        """How many different ones."""
        return len(self.seen)

    def summary(self) -> str:
        """One paragraph."""
        sizes = ", ".join(f"{number} of {size} ranks" for size, number in sorted(self.world_sizes.items()))
        calls = ", ".join(f"{name} {number}" for name, number in sorted(self.steps.items(), key=lambda item: (-item[1], item[0])))
        refusals = ", ".join(f"{name} {number}" for name, number in sorted(self.refusals.items()))
        left_out = ", ".join(f"{name} {number}" for name, number in sorted(self.left_out.items()))
        return (
            f"{self.programs} programs ({sizes}): {self.finished} finish alike, {self.inexact} of them within rounding; {self.refused} are"
            f" refused alike; on {self.disagreeing} the ranks disagree; the backend hung {self.hung} times and not again."
            f" Calls: {calls or 'none'}. Refused: {refusals or 'none'}."
            f" Steps left out for a listed difference: {left_out or 'none'}"
        )


class Certifier:
    """Compares programs on the simulator with a backend.

    Args:
        backend: ``gloo`` or ``nccl``.

    Attributes:
        bare: the bare processes.
        count: what has been compared so far.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.count = Count()
        self._recorded = process_world(backend)
        self.bare = BareWorld(backend)
        self._inexact = False

    def close(self) -> None:
        """End the bare processes; the recorded ones are the whole process's."""
        self.bare.close()

    def differences(self, program: Program) -> list[str]:
        """Where the simulator and the backend differ although they should not, one line each."""
        program, left_out = without_differences(program, self.backend)
        self._inexact = False
        ours = outcome(program)
        found = self._against_recorded(program, ours)
        disagreement = any(step.fault in DISAGREEMENTS for step in program.steps)
        if not disagreement:
            # What a backend makes of ranks that disagree is undefined: it hangs, crashes or computes nonsense.
            found += self._against_bare(program, ours)
        if not found and program.steps and repr(program) not in self.count.seen:
            self._add(program, ours, left_out, disagreement)
        return found

    def _add(self, program: Program, ours: Outcome, left_out: Sequence[str], disagreement: bool) -> None:
        count = self.count
        count.seen.add(repr(program))
        count.world_sizes[program.world_size] += 1
        count.left_out.update(left_out)
        if ours.error is None:
            count.finished += 1
            count.inexact += self._inexact
            count.steps.update(step.call for step in program.steps)
        elif disagreement:
            count.disagreeing += 1
        else:
            count.refused += 1
        if ours.error is not None:
            last = program.steps[-1]
            count.refusals[f"{last.fault or 'dtype, op or layout'}: {type(ours.error).__name__}"] += 1

    def _against_recorded(self, program: Program, ours: Outcome) -> list[str]:
        theirs = outcome(program, self._recorded)
        if isinstance(theirs.error, RankTimeout) and not isinstance(ours.error, RankTimeout):
            self.count.hung += 1
            theirs = outcome(program, self._recorded)
        if ours.error is not None or theirs.error is not None:
            found = [] if _other_fault(program, ours, theirs) else unequal_errors(ours.error, theirs.error)
            return [f"recorded: {line}" for line in found]
        assert ours.ledger is not None and theirs.ledger is not None
        found = unequal_ledgers(ours.ledger, theirs.ledger, program.world_size) + self._unequal(program, ours, theirs.outputs)
        return [f"recorded: {line}" for line in found]

    def _against_bare(self, program: Program, ours: Outcome) -> list[str]:
        ranks = self.bare.run(program)
        if ours.error is None and not any(rank.finished or rank.refused for rank in ranks):
            self.count.hung += 1
            ranks = self.bare.run(program)
        finished = all(rank.finished and not rank.refused for rank in ranks)
        if ours.error is None and finished:
            found = self._unequal(program, ours, [rank.outputs for rank in ranks]) + self._unequal_flights(ours, ranks)
        elif isinstance(ours.error, RankError) and _refused_alike(ours.error, ranks):
            found = []
        else:
            theirs = "; ".join(f"rank {rank}: {_end(bare)}" for rank, bare in enumerate(ranks))
            found = [f"the simulator {'finishes' if ours.error is None else f'ends with {_last(ours.error)}'} and the backend {theirs}"]
        return [f"bare: {line}" for line in found]

    def _unequal(self, program: Program, ours: Outcome, theirs: Sequence[Mapping[str, Tensor]]) -> list[str]:
        found = unequal_outputs(ours, theirs, None)
        if found and program.values == "normal":
            found = unequal_outputs(ours, theirs, slack(program))
            self._inexact = not found
        return found

    def _unequal_flights(self, ours: Outcome, ranks: Sequence[BareRank]) -> list[str]:
        """Our ledger against the backend's own recorder."""
        assert ours.ledger is not None
        found: list[str] = []
        if not any(bare.flights for bare in ranks):
            return found  # nothing was issued, or this release has no recorder that can be asked
        for rank, bare in enumerate(ranks):
            issued = Counter[Any]()
            for record in ours.ledger.rank(rank):
                issued.update(as_issued(record, self.backend))
            flown = Counter(_flight(flight) for flight in bare.flights)
            if issued != flown:
                found.append(f"rank {rank} issued {sorted(issued.elements())} and the backend recorded {sorted(flown.elements())}")
        return found


def _other_fault(program: Program, ours: Outcome, theirs: Outcome) -> bool:
    """Whether both name one of two faults on different ranks: either may end the run where ranks do not take turns."""
    if not isinstance(ours.error, RankError) or theirs.error is None:
        return False
    one_fault_less = (program.steps[:index] + program.steps[index + 1 :] for index in range(len(program.steps)))
    return any(not unequal_errors(outcome(replace(program, steps=steps)).error, theirs.error) for steps in one_fault_less if steps)


def _refused_alike(ours: RankError, ranks: Sequence[BareRank]) -> bool:
    """The rank that the simulator names was refused in the same way, or it still waits for one that was.

    Of two faults on different ranks, either may end the run.
    """
    theirs = [ranks[ours.rank]] if ranks[ours.rank].finished else [rank for rank in ranks if rank.refused]
    return any(same_error_class(ours.exception, rank.refused) for rank in theirs)


def _flight(flight: Mapping[str, Any]) -> tuple[str, str, int]:
    dtype = flight["input_dtypes"][0] if flight["input_dtypes"] else ""
    return (
        flight["profiling_name"].partition(":")[2],
        FLIGHT_DTYPES.get(dtype, dtype),
        sum(math.prod(size) for size in flight["input_sizes"]),
    )


def _end(rank: BareRank) -> str:
    return f"{rank.refused[0]}({rank.message[:200]})" if rank.refused else "finishes" if rank.finished else "does not come back"


def _last(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[-1][:300]}"


def behaviour(program: Program, bare: BareWorld) -> tuple[str, str]:
    """What the simulator and the backend make of a program: ``computes``, ``dies``, or the name of an exception's class.

    Where both compute the same, the second is ``computes the same``.
    """
    ours, ranks = outcome(program), bare.run(program)
    refused = [rank.refused for rank in ranks if rank.refused]
    theirs = refused[0][0] if refused else COMPUTES if all(rank.finished for rank in ranks) else DIES
    if ours.error is None and theirs == COMPUTES and not unequal_outputs(ours, [rank.outputs for rank in ranks], None):
        theirs = "computes the same"
    if not isinstance(ours.error, RankError):
        return COMPUTES if ours.error is None else type(ours.error).__name__, theirs
    mine = ours.error.exception
    return "RuntimeError" if isinstance(mine, RuntimeError) else type(mine).__name__, theirs


def slack(program: Program) -> list[dict[str, Tensor]]:
    """By rank and label, how far apart two orders of the program's reductions may end.

    A sum of n numbers in any order is off by at most (n - 1) u sum|x|, likewise a product by (n - 1) u prod|x|; two orders by twice
    that, and AVG divides once more. The sums of absolute values are what the program computes from absolute values. What is below the
    smallest normal number is off by half the smallest number of all, whatever its size: sums are exact there, but products are not,
    and the other factors enlarge what is lost, by at most the product of those above 1.
    """
    runs = []
    for kind in ("magnitudes", "factors"):
        made = outcome(replace(program, values=kind))
        if made.error is not None:
            raise made.error
        runs.append(made.outputs)
    return [
        {label: _slack(program, label, magnitude, factors[label]) for label, magnitude in magnitudes.items()}
        for magnitudes, factors in zip(*runs, strict=True)
    ]


def _slack(program: Program, label: str, magnitude: Tensor, factors: Tensor) -> Tensor:
    step = program.steps[int(label.split(maxsplit=1)[0])]
    if not _rounds(step) or not (magnitude.dtype.is_floating_point or magnitude.dtype.is_complex):
        return torch.zeros(magnitude.shape, dtype=torch.float64)
    roundings, limits = len(program.members(step)), torch.finfo(magnitude.dtype)
    lost = factors.to(torch.complex128).abs() * limits.tiny * limits.eps if step.op in ("PRODUCT", "AVG") else 0.0
    return roundings * (limits.eps * magnitude.to(torch.complex128).abs() + lost)


def _rounds(step: Step) -> bool:
    """Whether the call adds, multiplies or divides, in backward at least."""
    family, _, name = step.call.rpartition(".")
    return family in ("nn", "autograd") or (name.startswith((*REDUCING, "coalescing_manager")) and step.op in ("SUM", "PRODUCT", "AVG"))
