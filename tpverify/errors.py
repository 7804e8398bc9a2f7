"""Every error a user can meet, and which of them end a run, a subject or a command line."""

from __future__ import annotations


class TpverifyError(Exception):
    """Base of all errors raised by tpverify."""


class SubjectError(TpverifyError):
    """A subject contradicts itself: the way out is to change the subject, not the code under test."""


class CaseError(TpverifyError):
    """A case, its text form or an option cannot be used."""


class NoDevice(CaseError):
    """A GPU was asked for and this machine has none: nothing can be checked, which is no success."""


class JobError(TpverifyError):
    """A process of a job over several machines is gone, so that there can be no verdict."""


class CollectiveRefused(TpverifyError, ValueError, RuntimeError):
    """A call of a collective that no backend carries out; gloo refuses with RuntimeError, NCCL with ValueError, and this is either."""


class SimulationError(TpverifyError):
    """A simulated run did not finish.

    Attributes:
        ranks: the ranks concerned, in ascending order.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankError(SimulationError):
    """One rank raised; ``exception`` (also ``__cause__``) is what it raised."""

    def __init__(self, message: str, rank: int, exception: BaseException) -> None:
        super().__init__(message, (rank,))
        self.rank = rank
        self.exception = exception


class CollectiveMismatch(SimulationError):
    """Ranks met in one collective but disagree on what it is."""


class Deadlock(SimulationError):
    """Every rank that has not finished waits for something that can no longer happen."""


class RankTimeout(SimulationError):
    """A rank did not come back within ``timeout`` seconds: an endless loop, or a timeout too short for the work."""
