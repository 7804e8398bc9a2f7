"""Checks ``execution`` and ``rejection``: the code under test runs where it must and refuses what it must refuse."""

from __future__ import annotations

import traceback

from tpverify.case import short_repr
from tpverify.checks.finding import Finding
from tpverify.errors import RankError, RankTimeout
from tpverify.run import Comparison

_SAVED = ("modified by an inplace operation", "has been modified inplace")


def rejects(comparison: Comparison) -> bool:
    """Whether the subject says that this case must be refused."""
    rejects = comparison.subject.rejects
    return rejects is not None and rejects(comparison.case.config, comparison.case.world_size)


def execution(comparison: Comparison) -> list[Finding] | None:
    """No rank raises or hangs."""
    error = comparison.parallel.error
    if rejects(comparison):
        return None
    if not isinstance(error, (RankError, RankTimeout)):
        return []
    ranks = tuple(comparison.members.index(rank) for rank in error.ranks if rank in comparison.members)
    if error.ranks and not ranks:
        return []
    diagnosis = ""
    # not str(): an exception's own __str__ may raise
    said = "".join(traceback.format_exception_only(error.exception)) if isinstance(error, RankError) else ""
    if "dtype" in said:
        diagnosis = f"modules are built and run in {comparison.dtype}: the subject's precision changes that"
    if any(text in said for text in _SAVED):
        diagnosis = (
            "a collective in place over a tensor that autograd saved fits this: real backends compute wrong gradients without a word"
        )
    return [Finding(ranks or tuple(range(len(comparison.members))), "", f"Expected every rank to finish but {error}", diagnosis)]


def rejection(comparison: Comparison) -> list[Finding] | None:
    """A case that cannot be sharded is refused, with a ValueError unless the subject names another exception."""
    if not rejects(comparison):
        return None
    error = comparison.parallel.error
    if isinstance(error, RankError) and isinstance(error.exception, comparison.subject.refusal):
        return []
    got = "no rank refused it" if error is None else str(error)
    ranks = tuple(range(len(comparison.members)))
    refusal = comparison.subject.refusal.__name__
    refused = f"Expected {short_repr(comparison.case.config)} to be refused with a {refusal} on {len(ranks)} ranks"
    return [Finding(ranks, "", f"{refused} but {got}")]
