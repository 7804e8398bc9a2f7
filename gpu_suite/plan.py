"""How much is run: every count of the suite stands here, chosen so that all of it ends in time on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

BUDGET_SECONDS = 240
"""What the whole suite may take on one GPU."""

START_SECONDS = 45
"""Of these, for what is no case: imports, CUDA contexts, rank processes, NCCL communicators."""

DEADLINE_SECONDS = 225
"""When tests are no longer started. Counts do not depend on time; a suite that gets here fails, and names what was left out."""

SEED = 0
"""Of everything that is drawn."""


@dataclass(frozen=True)
class Count:
    """How much one row of the table is.

    Attributes:
        full: cases of each subject, on a GPU.
        tiny: the same, where only the path is to be kept alive.
        subjects: how many subjects there are.
        worlds: in how many worlds the row is run on one GPU.
        seconds: of one case, as estimated for one GPU.
    """

    full: int
    tiny: int
    subjects: int
    worlds: int
    seconds: float

    @property
    def total(self) -> float:
        """Seconds of the whole row on one GPU."""
        return self.full * self.subjects * self.worlds * self.seconds


COUNTS = {
    "subjects": Count(full=4, tiny=1, subjects=16, worlds=3, seconds=0.15),
    "repeated": Count(full=2, tiny=1, subjects=9, worlds=3, seconds=0.2),
    "programs": Count(full=40, tiny=4, subjects=1, worlds=2, seconds=0.1),
    "agreement": Count(full=2, tiny=1, subjects=8, worlds=2, seconds=0.2),
    "low precision": Count(full=2, tiny=1, subjects=36, worlds=3, seconds=0.1),
    "controls": Count(full=1, tiny=1, subjects=25, worlds=3, seconds=0.1),
    "calls": Count(full=1, tiny=1, subjects=23, worlds=3, seconds=0.1),
    "DTensor plans": Count(full=2, tiny=2, subjects=2, worlds=2, seconds=0.5),
    "schedules that differ": Count(full=1, tiny=1, subjects=5, worlds=2, seconds=0.4),
    "planted bugs": Count(full=1, tiny=1, subjects=90, worlds=2, seconds=0.2),
    "ranks that fail": Count(full=2, tiny=2, subjects=4, worlds=2, seconds=1.0),
    "streams": Count(full=2, tiny=2, subjects=6, worlds=2, seconds=0.3),
}
"""By row, in the order in which they are run: what may cost a process its device comes last."""


def count(row: str, tier: str) -> int:
    """Cases per subject.

    Args:
        row: one of ``COUNTS``.
        tier: ``full`` or ``tiny``.
    """
    return int(getattr(COUNTS[row], tier))
