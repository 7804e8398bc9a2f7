"""Ledgers as Flight Recorder dumps, one pickle a rank, which torch's own `torchfrtrace` reads.

The ledger is written rather than torch's buffer. It is there for every world, the simulator included; torch's is lost with the rank
process, which ends as soon as ranks disagree; and what torch 2.13 dumps for gloo names its groups differently in two places, so that
`torchfrtrace` stops with a KeyError. Three things get lost: the reduce op, which Flight Recorder does not know; times, in whose place
stand positions; and messages between two ranks, which `torchfrtrace` takes for collectives of the whole group.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tpverify.ledger.ledger import Ledger
from tpverify.ledger.matching import POINT_TO_POINT
from tpverify.ledger.record import Record

VERSION = "2.10"
"""Of the dump's format."""

BACKEND = "gloo"
"""`torchfrtrace` knows a fixed set of backends, and no simulator."""

NAMES = {
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "barrier": "all_reduce_barrier",
}
"""By kind, what Flight Recorder calls the operation where it has another name."""

FLAT = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds that move one flat buffer, whether the caller has it whole or as a list of parts."""

IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Kinds whose one tensor is input and output, on every rank."""

Place = tuple[str, tuple[int, ...], int]
"""Which collective: the group's name, its ranks, its number."""


def flight_recorder_dumps(ledgers: Mapping[str, Ledger]) -> dict[int, dict[str, Any]]:
    """By rank, what Flight Recorder would dump; several ledgers follow one another, each with groups of its own.

    Args:
        ledgers: by subject.
    """
    records = [(subject, record) for subject, ledger in ledgers.items() for record in ledger if record.kind not in POINT_TO_POINT]
    joined: defaultdict[Place, set[int]] = defaultdict(set)
    groups: dict[tuple[str, tuple[int, ...]], str] = {}
    for subject, record in records:
        joined[_place(subject, record)].add(record.rank)
        groups[_name(subject, record), record.group_ranks] = record.process_group[1]
    dumps = {rank: _empty(rank, groups) for rank in sorted({member for _, members in groups for member in members})}
    for subject, record in records:
        entries = dumps[record.rank]["entries"]
        complete = joined[_place(subject, record)].issuperset(record.group_ranks)
        entries.append(_entry(record, len(entries), _name(subject, record), "completed" if complete else "scheduled"))
    return dumps


def write_flight_recorder(prefix: Path, ledgers: Mapping[str, Ledger]) -> tuple[Path, ...]:
    """Write a file a rank: ``prefix`` and the rank's number, as ``TORCH_FR_DUMP_TEMP_FILE`` has it."""
    paths = []
    for rank, dump in flight_recorder_dumps(ledgers).items():
        paths.append(prefix.with_name(f"{prefix.name}{rank}"))
        paths[-1].write_bytes(pickle.dumps(dump, protocol=2))
    return tuple(paths)


def _name(subject: str, record: Record) -> str:
    return f"{subject}/{record.process_group[0]}"


def _place(subject: str, record: Record) -> Place:
    return _name(subject, record), record.group_ranks, record.collective_seq_id


def _empty(rank: int, groups: Mapping[tuple[str, tuple[int, ...]], str]) -> dict[str, Any]:
    config = {
        name: {"name": name, "desc": description, "ranks": str(list(members))}
        for (name, members), description in groups.items()
        if rank in members
    }
    return {"version": VERSION, "pg_config": config, "entries": []}


def _entry(record: Record, position: int, name: str, state: str) -> dict[str, Any]:
    inputs, outputs = _buffers(record)
    return {
        "record_id": position,
        "pg_id": 0,
        "process_group": (name, record.process_group[1]),
        "collective_seq_id": record.collective_seq_id,
        "p2p_seq_id": 0,
        "op_id": position + 1,
        "profiling_name": f"{BACKEND}:{NAMES.get(record.kind, record.kind)}",
        "time_created_ns": position,
        "input_sizes": [list(size) for size, _ in inputs],
        "input_dtypes": [dtype for _, dtype in inputs],
        "output_sizes": [list(size) for size, _ in outputs],
        "output_dtypes": [dtype for _, dtype in outputs],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": site.function, "filename": site.filename, "line": site.line} for site in record.call_sites],
    }


Buffers = list[tuple[tuple[int, ...], str]]


def _buffers(record: Record) -> tuple[Buffers, Buffers]:
    """Inputs and outputs as (size, dtype)."""
    inputs = list(zip(record.input_sizes, record.input_dtypes, strict=True))
    outputs = list(zip(record.output_sizes, record.output_dtypes, strict=True))
    if record.kind in IN_PLACE:
        return inputs or outputs, inputs or outputs
    if record.kind in FLAT:
        return _flat(inputs), _flat(outputs)
    return inputs, outputs


def _flat(buffers: Buffers) -> Buffers:
    return [((sum(prod(size) for size, _ in buffers),), buffers[0][1])] if buffers else []
