"""Verifications in threads, and programs that raise what cannot be shown."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import tpverify as tpv


def test_verifications_from_several_threads_leave_the_default_dtype_alone() -> None:
    passed: list[bool] = []

    class Slow(torch.nn.Linear):
        def __init__(self, config: Any) -> None:
            time.sleep(0.002)
            super().__init__(2, 2)

    subject = tpv.Subject(
        name="slow",
        reference=Slow,
        parallel=Slow,
        configs=tpv.configs(batch=st.integers(1, 2)),
        inputs=lambda config: {"x": tpv.Input((config.batch, 2))},
        placements={"*": tpv.Replicate()},
    )

    def start(seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hypothesis notices that other threads' ranks have generators of their own
            passed.append(tpv.verify(subject, max_examples=15, seed=seed).passed)

    threads = [threading.Thread(target=start, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert passed == [True] * 3
    assert torch.get_default_dtype() == torch.float32


class Unprintable(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise LookupError("no text")

    __repr__ = __str__


class Raises(torch.nn.Linear):
    """A layer that cannot run."""

    error: type[Exception] = Unprintable

    def __init__(self, config: Any) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises."""
        raise self.error("a dtype that does not fit")


class RaisesText(Raises):
    """As above, with a message."""

    error = ValueError


@pytest.mark.parametrize(("parallel", "diagnosed"), [(Raises, False), (RaisesText, True)])
def test_an_exception_that_cannot_be_shown_is_a_violation_like_any_other(parallel: type[Raises], diagnosed: bool) -> None:
    subject = tpv.Subject(
        name="raises",
        reference=lambda config: torch.nn.Linear(2, 2),
        parallel=parallel,
        configs=tpv.configs(batch=st.integers(1, 2)),
        inputs=lambda config: {"x": tpv.Input((config.batch, 2))},
        placements={"*": tpv.Replicate()},
    )
    (violation,) = tpv.verify(subject, max_examples=5, seed=0).violations
    assert violation.check == "execution"
    assert f"raised {parallel.error.__name__}" in violation.message
    assert ("precision" in violation.diagnosis) is diagnosed
