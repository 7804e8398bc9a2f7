"""Which report formats there are, and how one is asked for: FORMAT=PATH. Writers are imported when they are used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from tpverify.errors import CaseError
from tpverify.options import did_you_mean

if TYPE_CHECKING:
    from tpverify.report.report import Report

WRITERS = {
    "text": ("tpverify.report.text", "write_text"),
    "json": ("tpverify.report.json_document", "write_json"),
    "html": ("tpverify.report.html", "write_html"),
    "trace": ("tpverify.report.trace", "write_trace"),
}
"""Format -> (module, function); the function takes a Report and returns the file's text."""

FLIGHT_RECORDER = "flight-recorder"
"""The one format of several files, one a rank: its path is what their names begin with."""

FORMATS = (*WRITERS, FLIGHT_RECORDER)

NEED_LEDGERS = frozenset({"html", "trace", FLIGHT_RECORDER})
"""Formats that show ledgers, so that whoever writes the report runs one case of each subject for them."""

LEDGERS_ONLY = ("trace", FLIGHT_RECORDER)
"""Formats that show nothing else."""


def parse_report(text: str) -> tuple[str, Path]:
    """Read ``FORMAT=PATH``.

    Raises:
        CaseError: there is no such format, no path, or no such folder.
    """
    name, separator, path = text.partition("=")
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS)
        raise CaseError(f"Expected FORMAT=PATH with a format of {', '.join(FORMATS)} but got {text!r}{hint}")
    if not separator or not path:
        raise CaseError(f"Expected FORMAT=PATH, as in {name}=report.{name}, but got {text!r}")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise CaseError(f"Expected the path of a file in an existing folder but got {text!r}")
    return name, Path(path)


def format_report(name: str, report: Report) -> str:
    """The report as the text of one format."""
    module, function = WRITERS[name]
    text: str = getattr(importlib.import_module(module), function)(report)
    return text


def write_report(name: str, path: Path, report: Report) -> None:
    """Write the report in one format to a file, as UTF-8; for Flight Recorder to a file a rank."""
    if name == FLIGHT_RECORDER:
        from tpverify.report.flight_recorder import write_flight_recorder

        write_flight_recorder(path, report.ledgers)
        return
    path.write_text(format_report(name, report), encoding="utf-8")
