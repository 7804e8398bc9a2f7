"""The ordered record of every collective as each rank issued it, and the questions that can be asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import Any

from tpverify.errors import CaseError
from tpverify.ledger.matching import first_disagreement
from tpverify.ledger.record import CallSite, Record

HAZARDS = {
    "non-contiguous": "a non-contiguous tensor at a collective: NCCL raises, gloo may read or write the wrong elements",
    "written in flight": "a buffer was written while its collective was in flight",
    "never waited": "an asynchronous collective whose Work was never waited for",
    "never received": "a message that was sent but never received",
}
"""What a call may do that a real backend does not survive, and what that means."""

SCHEMA_VERSION = 1


class Ledger:
    """All collectives of a run, rank by rank, in the order in which each rank issued them."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records: tuple[Record, ...] = tuple(records)

    def __repr__(self) -> str:
        return f"Ledger({len(self.records)} records of ranks {', '.join(map(str, self.ranks)) or 'none'})"

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that issued at least one collective, ascending."""
        return tuple(sorted({record.rank for record in self.records}))

    def rank(self, rank: int) -> Ledger:
        """What one (global) rank issued."""
        return Ledger(record for record in self.records if record.rank == rank)

    def where(self, *, phase: str = "*", module: str = "*", kind: str = "*") -> Ledger:
        """Records whose phase, module path and kind match the fnmatch patterns."""
        return Ledger(
            record
            for record in self.records
            if fnmatchcase(record.phase, phase) and fnmatchcase(record.module, module) and fnmatchcase(record.kind, kind)
        )

    def within(self, ranks: Iterable[int]) -> Ledger:
        """What the given ranks issued on groups that hold only those ranks."""
        members = set(ranks)
        return Ledger(record for record in self.records if record.rank in members and members.issuperset(record.group_ranks))

    def beyond(self, ranks: Iterable[int]) -> Ledger:
        """What the given ranks issued on groups that hold others as well."""
        members = set(ranks)
        return Ledger(record for record in self.records if record.rank in members and not members.issuperset(record.group_ranks))

    def counts(self) -> dict[tuple[str, str, str], int]:
        """How often each (phase, module, kind) occurs on the lowest rank, in order of first issue."""
        lowest = self.ranks[0] if self.records else 0
        return dict(Counter((record.phase, record.module, record.kind) for record in self.records if record.rank == lowest))

    def elements(self) -> int:
        """Elements of all messages of the lowest rank."""
        return sum(record.elements for record in self.rank(self.ranks[0])) if self.records else 0

    def nbytes(self) -> int:
        """Bytes of all messages of the lowest rank."""
        return sum(record.nbytes for record in self.rank(self.ranks[0])) if self.records else 0

    def disagreement(self) -> str:
        """The first collective on which the ranks do not agree, as a message; "" if they all do."""
        return first_disagreement(self.records)

    def hazards(self) -> tuple[Record, ...]:
        """Records of calls that a real backend may not survive."""
        return tuple(record for record in self.records if record.hazards)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data; payloads are left out."""
        return {"schema_version": SCHEMA_VERSION, "records": [_record_as_dict(record) for record in self.records]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """Read back :meth:`as_dict`.

        Raises:
            CaseError: the data are not a ledger of this version.
        """
        try:
            version = data["schema_version"]
            if version != SCHEMA_VERSION:
                raise CaseError(f"Expected a ledger of schema_version={SCHEMA_VERSION} but got schema_version={version!r}")
            records = [_record_from_dict(item) for item in data["records"]]
        except KeyError as error:
            raise CaseError(f"Expected a saved ledger but got data without {error}") from error
        except (TypeError, ValueError) as error:
            raise CaseError(f"Expected a saved ledger but got other data: {error}") from error
        return cls(records)


def _record_as_dict(record: Record) -> dict[str, Any]:
    data = {field.name: getattr(record, field.name) for field in fields(Record) if field.name != "payload"}
    data["profiling_name"] = record.profiling_name
    data["call_sites"] = [[site.filename, site.line, site.function] for site in record.call_sites]
    return data


def _record_from_dict(data: Mapping[str, Any]) -> Record:
    values = {field.name: _frozen(data[field.name]) for field in fields(Record) if field.name not in ("payload", "call_sites")}
    sites = tuple(CallSite(filename, line, function) for filename, line, function in data["call_sites"])
    return replace(Record(**values, call_sites=()), call_sites=sites)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value
