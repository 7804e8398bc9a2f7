"""Progress on stderr: one line a finished subject, a live bar as well where stderr is a terminal, nothing when quiet."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tpverify.report.report import verdict
from tpverify.result import Result


class ProgressLog:
    """Use as a context manager around the verification of several subjects."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, transient=True, disable=quiet or not self._console.is_terminal)

    def __enter__(self) -> ProgressLog:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def start(self, subject: str, max_examples: int) -> Callable[[int, int], None]:
        """Begin a subject; returns the function to call with (cases done, cases at most)."""
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        task = self._bars.add_task(subject, total=max_examples)
        # Shrinking runs more cases than were asked for: the bar then grows with them.
        return lambda done, most: self._bars.update(task, completed=done, total=max(done, most))

    def finish(self, result: Result) -> None:
        """Say how one subject came out."""
        self._console.print(Text(f"{result.subject}: {verdict(result)}, {result.cases_run} cases, {result.seconds:.1f} s"))
