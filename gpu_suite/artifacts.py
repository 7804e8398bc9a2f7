"""What a run leaves in a folder: the table, and of every failure its report, its ledger and Flight Recorder dumps for `torchfrtrace`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from gpu_suite.places import Place
from gpu_suite.table import Row
from tpverify.report.flight_recorder import write_flight_recorder
from tpverify.verification import read_case, run_case
from tpverify.violation import Violation, failure_report


def save_table(folder: Path, rows: Sequence[Row], text: str) -> None:
    """``table.txt`` and ``table.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "table.json").write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n", encoding="utf-8")


def save_failure(folder: Path, violation: Violation, place: Place) -> Path:
    """Of a violation: ``report.txt``, ``ledger.json``, and ``flight_recorder/rank_N``, from one more run of its case.

    Returns:
        the failure's own folder.
    """
    own = folder / re.sub(r"[^\w.-]+", "_", f"{violation.subject}-{violation.check}-{place}")
    (own / "flight_recorder").mkdir(parents=True, exist_ok=True)
    (own / "report.txt").write_text(failure_report(violation) + "\n", encoding="utf-8")
    subject, case = read_case(violation.case)
    ledger = run_case(subject, case, world=place.world, device=place.device).parallel.ledger
    (own / "ledger.json").write_text(json.dumps(ledger.as_dict(), indent=1) + "\n", encoding="utf-8")
    write_flight_recorder(own / "flight_recorder" / "rank_", {subject.name: ledger})
    return own
