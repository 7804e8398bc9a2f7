"""What executes the ranks of a case, seen from the runner: the simulator is built in, other worlds implement this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tpverify.case import Case
from tpverify.errors import SimulationError
from tpverify.ledger.ledger import Ledger
from tpverify.run import RankRun
from tpverify.subjects.subject import Subject

WorldRun = tuple[Ledger, Sequence[RankRun | None], SimulationError | None]
"""Every collective, in order of issue on each rank; what each global rank produced; why the run did not finish."""


class World(Protocol):
    """Executes the ranks of one case, all of them and each by itself."""

    @property
    def most_ranks(self) -> int:
        """How many ranks there may be."""

    def check_ranks(self, count: int) -> None:
        """See that there may be so many ranks.

        Raises:
            CaseError: there may not; the message says why.
        """

    def run(self, subject: Subject, case: Case, *, traced: int, timeout: float) -> WorldRun:
        """Run the parallel side of a case.

        Args:
            traced: the call, from 1, in which to capture what goes into and comes out of every submodule; 0 = in none.
            timeout: seconds for all ranks together.

        Raises:
            CaseError: this world cannot run the subject or the case.
        """
