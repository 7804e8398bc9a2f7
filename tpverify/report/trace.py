"""Chrome trace events (for Perfetto or chrome://tracing): a process per subject, a track per rank, an event per collective."""

from __future__ import annotations

import json
from typing import Any

from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record
from tpverify.report.report import Report

STEP = 1000
"""Distance of two events of one rank, in the format's microseconds: position in the ledger, not time."""


def as_trace(report: Report) -> dict[str, Any]:
    """The trace as JSON-ready data; events carry order and size, never durations."""
    events: list[dict[str, Any]] = []
    for process, (subject, ledger) in enumerate(report.ledgers.items()):
        events += _process_events(process, subject, ledger)
    return {"displayTimeUnit": "ms", "otherData": {"axis": "position in each rank's ledger, not time"}, "traceEvents": events}


def write_trace(report: Report) -> str:
    """The trace as text, with a final newline."""
    return json.dumps(as_trace(report), indent=1, sort_keys=True) + "\n"


def _process_events(process: int, subject: str, ledger: Ledger) -> list[dict[str, Any]]:
    names = [_metadata("process_name", process, 0, subject)]
    for rank in ledger.ranks:
        names.append(_metadata("thread_name", process, rank, f"rank {rank}"))
    return names + [_event(process, record) for record in ledger.records]


def _metadata(name: str, process: int, rank: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": rank, "args": {"name": value}}


def _event(process: int, record: Record) -> dict[str, Any]:
    group, description = record.process_group
    return {
        "ph": "X",
        "name": record.describe(),
        "cat": record.phase,
        "pid": process,
        "tid": record.rank,
        "ts": record.op_id * STEP,
        "dur": STEP * 9 // 10,
        "args": {
            "profiling_name": record.profiling_name,
            "phase": record.phase,
            "module": record.module,
            "process_group": description or group,
            "group_ranks": list(record.group_ranks),
            "collective_seq_id": record.collective_seq_id,
            "input_sizes": [list(size) for size in record.input_sizes],
            "output_sizes": [list(size) for size in record.output_sizes],
            "elements": record.elements,
            "bytes": record.nbytes,
            "call_sites": [str(site) for site in record.call_sites],
            "hazards": list(record.hazards),
        },
    }
