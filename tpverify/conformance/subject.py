"""A program as a subject, so that every world runs it unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpverify.case import Case
from tpverify.conformance.calls import CALLS
from tpverify.conformance.interpreter import run_program
from tpverify.conformance.program import Program, Step
from tpverify.subjects.subject import Input, Subject


class Nothing(nn.Module):
    """Hands its input on: the single device has no one to talk to."""

    def forward(self, x: Tensor) -> Any:
        """[1] -> [1]"""
        return x


class Interpreted(nn.Module):
    """Runs the program in forward."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor) -> Any:
        """[1] -> what the steps left, by label."""
        with torch.enable_grad():
            return x.detach(), run_program(self.program, CALLS)


programs = Subject(
    name=f"{__name__}:programs",
    reference=lambda program: Nothing(),
    parallel=Interpreted,
    configs=lambda world_size: _no_strategy(),
    inputs=lambda program: {"x": Input((1,), grad=False)},
)


def _no_strategy() -> Any:
    from hypothesis import strategies

    return strategies.just(Program(1, (Step("barrier"),)))


def case_of(program: Program) -> Case:
    """The case that runs a program."""
    return Case(programs.name, program, program.world_size)
