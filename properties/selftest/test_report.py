"""Every report format says what the results and ledgers say, in full, and nothing more."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tpverify.errors import CaseError
from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import CallSite, Record
from tpverify.report import WRITERS, format_report, parse_report, write_report
from tpverify.report.ledger_text import ledger_difference, ledger_rows
from tpverify.report.report import Report, SubjectFailure, result_from_dict
from tpverify.report.text import closing_line
from tpverify.result import Result
from tpverify.violation import Violation, failure_report

VIOLATION = Violation(
    check="gradient",
    subject="ColumnParallelLinear",
    world_size=2,
    ranks=(0, 1),
    tensor="input.grad",
    message="Tensor-likes are not close!\n\n[bold]1 < 2[/bold] & more",
    diagnosis="rank 0 + rank 1 equals the expected value: a missing all_reduce(SUM) in backward fits this",
    case="Case('c', Config(batch=1), world_size=2)",
    replay="tpverify replay \"Case('c', Config(batch=1), world_size=2)\"",
)
HELD = Result("row", 10, {1: 4, 2: 6}, {"forward": 10, "gradient": 8, "vocabulary": 0}, 1, (), 1.25)
FAILED = Result("column", 7, {2: 7}, {"forward": 7, "gradient": 7}, 0, (VIOLATION,), 0.5)


def record(op_id: int, rank: int, **changes: Any) -> Record:
    """An all_reduce of float64[2, 3] over ranks 0 and 1, in the forward pass of ``down``."""
    fields: dict[str, Any] = {
        "op_id": op_id,
        "rank": rank,
        "kind": "all_reduce",
        "process_group": ("0", "tp"),
        "group_ranks": (0, 1),
        "collective_seq_id": op_id + 1,
        "p2p_seq_id": 0,
        "input_sizes": ((2, 3),),
        "input_dtypes": ("float64",),
        "output_sizes": ((2, 3),),
        "output_dtypes": ("float64",),
        "reduce_op": "SUM",
        "root": None,
        "phase": "forward",
        "module": "down",
        "call_sites": (CallSite("/home/me/layers.py", 12, "forward"),),
        "is_async": False,
        "nbytes": 48,
        "elements": 6,
    }
    return Record(**{**fields, **changes})


LEDGER = Ledger(
    [
        record(0, 0),
        record(0, 1),
        record(1, 1, phase="backward", module=""),
        record(1, 0, phase="backward", module=""),
        record(2, 0, phase="backward", module=""),
        record(2, 1, phase="backward", module=""),
    ]
)
REPORT = Report((HELD, FAILED), seed=3, ledgers={"row": LEDGER}, failures=(SubjectFailure("typo", "usage", "Expected a <subject>"),))


class TagLog(HTMLParser):
    """Collects tags, their attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the tag; void elements have no end."""
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Elements close in order."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note the text."""
        self.text += data


def test_failure_report_has_the_documented_layout() -> None:
    assert failure_report(VIOLATION).splitlines() == [
        "tpverify: gradient check failed: ColumnParallelLinear, world_size=2, ranks 0 and 1",
        "",
        "Tensor-likes are not close!",
        "",
        "[bold]1 < 2[/bold] & more",
        "  rank 0 + rank 1 equals the expected value: a missing all_reduce(SUM) in backward fits this",
        "Failing test case: Case('c', Config(batch=1), world_size=2)",
        "Replay: tpverify replay \"Case('c', Config(batch=1), world_size=2)\"",
    ]


@pytest.mark.parametrize(
    ("ranks", "end"), [((), "world_size=2"), ((3,), "rank 3"), ((0, 1, 2), "ranks 0, 1 and 2")], ids=["none", "one", "three"]
)
def test_failure_report_names_the_ranks(ranks: tuple[int, ...], end: str) -> None:
    bare = Violation("forward", "row", 2, ranks, "output", "differs")
    assert failure_report(bare).splitlines()[0].endswith(end)
    assert failure_report(bare).splitlines()[-1] == "differs"


def test_closing_line_counts_checks_that_applied_and_were_not_violated() -> None:
    assert closing_line(Report((HELD, FAILED))) == "2 subjects, 17 cases, 3 checks held, 1 violation"
    assert closing_line(Report((HELD,))) == "1 subject, 10 cases, 2 checks held, 0 violations"
    assert closing_line(REPORT).endswith("1 subject not verified")


def test_text_report_is_whole_and_plain() -> None:
    text = format_report("text", REPORT)
    row = next(line for line in text.splitlines() if line.strip().startswith("row"))
    assert row.split() == ["row", "10", "1,", "2", "2", "1", "held", "1.2"]
    assert failure_report(VIOLATION) in text
    assert "typo was not verified: Expected a <subject>" in text
    assert text.endswith(closing_line(REPORT) + "\n")
    assert "\x1b" not in text


def test_json_document_has_the_stable_fields_and_reads_back() -> None:
    document = json.loads(format_report("json", REPORT))
    assert set(document) == {"schema_version", "passed", "seed", "subjects", "errors"}
    assert document["passed"] is False
    assert document["seed"] == 3
    keys = {"check", "subject", "world_size", "ranks", "tensor", "message", "diagnosis", "case", "replay"}
    assert set(document["subjects"][1]["violations"][0]) == keys
    assert [result_from_dict(item).as_dict() for item in document["subjects"]] == document["subjects"]
    assert result_from_dict(document["subjects"][1]).violations == (VIOLATION,)


@pytest.mark.parametrize(
    ("report", "passed"),
    [(Report((HELD,)), True), (Report((HELD, FAILED)), False), (Report(()), False), (Report((HELD, Result("x", 0))), False)],
    ids=["held", "violated", "no subject", "no case"],
)
def test_only_a_report_with_cases_and_without_violations_passed(report: Report, passed: bool) -> None:
    assert report.passed is passed
    assert json.loads(format_report("json", report))["passed"] is passed


def test_html_is_self_contained_and_escaped() -> None:
    page = format_report("html", REPORT)
    log = TagLog(page)
    assert log.open == []
    assert {tag for tag, _ in log.tags}.isdisjoint({"script", "link", "img", "iframe", "bold", "subject"})
    assert not any(attribute in attrs for _, attrs in log.tags for attribute in ("src", "href"))
    assert "url(" not in page
    assert "@import" not in page
    assert failure_report(VIOLATION) in log.text
    assert "Expected a <subject>" in log.text
    assert "float64[2, 3]" in log.text
    assert closing_line(REPORT) in log.text


def test_trace_has_one_track_a_rank_and_one_event_a_collective_in_order() -> None:
    trace = json.loads(format_report("trace", REPORT))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {("process_name", 0, 0): "row", ("thread_name", 0, 0): "rank 0", ("thread_name", 0, 1): "rank 1"}
    assert len(events) == len(LEDGER)
    for rank in (0, 1):
        track = [event for event in events if event["tid"] == rank]
        assert [event["cat"] for event in track] == ["forward", "backward", "backward"]
        assert all(first["ts"] + first["dur"] <= second["ts"] for first, second in zip(track, track[1:], strict=False))
    assert events[0]["name"] == "all_reduce(SUM, float64[2, 3])"
    assert events[0]["args"]["call_sites"] == ["/home/me/layers.py:12"]
    assert events[0]["args"]["bytes"] == 48


def test_trace_without_ledgers_is_empty_but_valid() -> None:
    assert json.loads(format_report("trace", Report((HELD,))))["traceEvents"] == []


def test_ledger_rows_count_equal_collectives_of_the_lowest_rank() -> None:
    rows = ledger_rows(LEDGER)
    assert [(row.phase, row.module, row.count, row.elements, row.nbytes) for row in rows] == [
        ("forward", "down", 1, 6, 48),
        ("backward", "(root)", 2, 12, 96),
    ]
    assert rows[0].call_site == "/home/me/layers.py:12"
    assert ledger_rows(Ledger([])) == []


def test_call_sites_are_shown_from_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    here = Ledger([record(0, 0, call_sites=(CallSite(str(tmp_path / "pkg" / "a.py"), 3, "f"),))])
    installed = Ledger([record(0, 0, call_sites=(CallSite("/usr/lib/site-packages/pkg/a.py", 3, "f"),))])
    assert ledger_rows(here)[0].call_site == ledger_rows(installed)[0].call_site == "pkg/a.py:3"


def test_ledger_difference_ignores_call_sites_and_names_what_changed() -> None:
    moved = Ledger(record(item.op_id, item.rank, phase=item.phase, module=item.module, call_sites=()) for item in LEDGER)
    assert ledger_difference(LEDGER, moved) == ""
    difference = ledger_difference(LEDGER, Ledger(item for item in LEDGER if item.op_id < 2)).splitlines()
    removed = [line for line in difference if line.startswith("-") and not line.startswith("---")]
    assert [line.split()[:5] for line in removed] == [["-rank", str(rank), "backward", "(root)", "all_reduce(SUM,"] for rank in (0, 1)]
    grown = Ledger([*LEDGER.records[:-1], record(2, 1, phase="backward", module="", input_sizes=((4, 3),))])
    assert "float64[4, 3]" in ledger_difference(LEDGER, grown)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_written_and_depends_on_the_report_alone(name: str, tmp_path: Path) -> None:
    write_report(name, tmp_path / "file", REPORT)
    assert (tmp_path / "file").read_text(encoding="utf-8") == format_report(name, REPORT) == format_report(name, REPORT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("htm=x.html", "did you mean html"),
        ("html", "html=report.html"),
        ("html=", "html=report.html"),
        ("json=no/such/folder/x", "existing"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_at_once(text: str, says: str) -> None:
    with pytest.raises(CaseError, match=says):
        parse_report(text)
