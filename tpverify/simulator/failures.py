"""What a failed run says about the rank that raised: its own traceback, without the harness's frames."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from types import TracebackType

from tpverify.errors import Deadlock, RankError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LONGEST = 10_000
_ENDING = 2_000
_SUBJECTS = os.path.join(_PACKAGE, "subjects") + os.sep


def _is_ours(filename: str) -> bool:
    """Whether a file is the harness's; the built-in subjects are code under test."""
    return filename.startswith(_PACKAGE + os.sep) and not filename.startswith(_SUBJECTS)


def rank_error(rank: int, exception: BaseException, consequence: str = "") -> RankError:
    """The error of a rank that raised ``exception``.

    Args:
        consequence: what else went wrong because the rank left its path, shown after the traceback.
    """
    exception.__traceback__ = _from_user(exception.__traceback__)
    report = traceback.TracebackException.from_exception(exception)
    _hide_own_frames(report)
    text = f"rank {rank} raised {type(exception).__name__}\n{_shortened(''.join(report.format()).rstrip())}"
    return RankError(f"{text}\n\n{consequence}" if consequence else text, rank, exception)


def _shortened(text: str) -> str:
    """A text with its middle left out if it is very long: some exceptions print whole tensors or files."""
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    return f"{text[: _LONGEST - _ENDING]}\n... {left_out} characters left out ...\n{text[-_ENDING:]}"


def deadlock(waiting: Mapping[int, str], world_size: int) -> Deadlock:
    """The error of a world in which no rank can go on.

    Args:
        waiting: what each rank that has not finished waits for.
    """
    lines = [f"  rank {rank}  {waiting.get(rank, 'has finished')}" for rank in range(world_size)]
    message = "Expected every rank to go on but no rank can: each waits for a rank that will not come\n"
    return Deadlock(message + "\n".join(lines), tuple(sorted(waiting)))


def _from_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not the harness's."""
    user = trace
    while user is not None and _is_ours(user.tb_frame.f_code.co_filename):
        user = user.tb_next
    return user or trace


def _hide_own_frames(report: traceback.TracebackException) -> None:
    seen: list[traceback.TracebackException] = []
    todo: list[traceback.TracebackException | None] = [report]
    while todo:
        part = todo.pop()
        if part is not None and not any(part is known for known in seen):
            seen.append(part)
            kept = [frame for frame in part.stack if not _is_ours(frame.filename)]
            part.stack[:] = kept
            todo += [part.__cause__, part.__context__]
