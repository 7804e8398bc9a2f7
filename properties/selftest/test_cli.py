"""The command line as scripts see it: exit codes, one document on stdout, progress on stderr, equal bytes for equal seeds."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tpverify import verification
from tpverify.cli import main
from tpverify.cli.exit_codes import PRIORITY, ExitCode, worst
from tpverify.result import Result as SubjectResult

HERE = Path(__file__).parent
ROW, UNREDUCED, CONTRADICTING = "row_parallel_linear", "cli_subjects:unreduced", "cli_subjects:contradicting"
QUICK = ("--max-examples", "5")


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def tpverify(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, list(arguments))


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    command = [sys.executable, "-c", "from tpverify.cli import main; main(prog_name='tpverify')", *arguments]
    return subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fake_verify(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | SubjectResult) -> None:
    """Let every verification end in one way."""

    def verify(subject: Any, **options: Any) -> SubjectResult:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(verification, "verify", verify)


def test_held_is_0_and_says_what_was_done() -> None:
    done = tpverify("verify", ROW, *QUICK)
    assert done.exit_code == ExitCode.HELD, done.output
    assert done.stdout.splitlines()[-1].startswith("1 subject, ")
    assert done.stdout.splitlines()[-1].endswith("checks held, 0 violations")
    assert done.stderr.startswith(f"{ROW}: held, ")


def test_a_failed_check_is_1_with_a_report_that_can_be_replayed() -> None:
    done = tpverify("verify", UNREDUCED, "--world-sizes", "2", *QUICK)
    assert done.exit_code == ExitCode.VIOLATED, done.output
    assert f"check failed: {UNREDUCED}, world_size=2, ranks 0 and 1" in done.stdout
    case = next(line for line in done.stdout.splitlines() if line.startswith("Failing test case: ")).removeprefix("Failing test case: ")
    again = tpverify("replay", case)
    assert again.exit_code == ExitCode.VIOLATED, again.output
    assert f"check failed: {UNREDUCED}, world_size=2, ranks 0 and 1" in again.stdout
    right = case.replace(UNREDUCED, ROW)
    assert tpverify("replay", right).exit_code == ExitCode.HELD


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "row_paralel_linear"), "row_parallel_linear"),
        (("verify", "no_such_module:subject"), "no_such_module"),
        (("verify", "cli_subjects:unreduce"), "unreduced"),
        (("verify", "cli_subjects:not_a_subject"), "not_a_subject"),
        (("verify", CONTRADICTING), "low < high"),
        (("verify", "--check", "forwrd"), "did you mean forward"),
        (("verify", "--world", "glo"), "simulator"),
        (("verify", "--world-sizes", "1,0"), "at least 1"),
        (("verify", "--max-examples", "0"), "0"),
        (("verify", "--report", "htm=x"), "did you mean html"),
        (("verify", "--max-exmples", "1"), "--max-examples"),
        (("verfy",), "did you mean verify"),
        (("replay", "Case("), "Case("),
        (("replay", "Case('row_parallel_linear', open('x'), world_size=2)"), "open"),
        (("ledger", ROW, "--against", "no_such_file"), "no_such_file"),
        (("ledger", ROW, "--against", "cli_subjects.py"), "--save"),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_2_and_says_the_way_out(arguments: tuple[str, ...], says: str) -> None:
    done = tpverify(*arguments)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert says in done.stderr
    assert "Traceback" not in done.output


def test_an_unexpected_exception_is_3_in_one_line_and_verbose_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_verify(monkeypatch, RuntimeError("the harness is broken\nin two lines"))
    done = tpverify("verify", ROW, "-q")
    assert done.exit_code == ExitCode.INTERNAL
    assert done.stderr.splitlines() == ["tpverify: internal error: RuntimeError: the harness is broken (-v shows the traceback)"]
    assert "in fake" not in done.output
    assert "Traceback" in tpverify("verify", ROW, "-q", "-v").stderr


def test_an_unexpected_exception_outside_a_subject_is_3_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ValueError("no subjects today")

    monkeypatch.setattr(verification, "builtin_subjects", broken)
    done = tpverify("verify")
    assert (done.exit_code, len(done.stderr.splitlines())) == (ExitCode.INTERNAL, 1)


def test_zero_cases_are_5_and_have_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_verify(monkeypatch, SubjectResult(ROW, 0))
    done = tpverify("verify", ROW, "--json", "-q")
    assert done.exit_code == ExitCode.NOTHING_CHECKED
    assert json.loads(done.stdout)["passed"] is False


def test_interrupted_is_130_and_keeps_what_was_done() -> None:
    process = spawn("verify", "no_such_module:subject", ROW, "--max-examples", "1000000", "--world-sizes", "1", "--json")
    assert process.stderr is not None
    assert "no_such_module" in process.stderr.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, stderr
    assert "Traceback" not in stderr
    assert [(item["subject"], item["kind"]) for item in json.loads(stdout)["errors"]] == [
        ("no_such_module:subject", "usage"),
        (ROW, "interrupted"),
    ]


def test_one_wrong_subject_does_not_stop_the_others_and_the_worst_code_counts() -> None:
    done = tpverify("verify", CONTRADICTING, UNREDUCED, ROW, "--world-sizes", "1,2", "--json", *QUICK)
    document = json.loads(done.stdout)
    assert done.exit_code == ExitCode.USAGE
    assert [item["name"] for item in document["subjects"]] == [UNREDUCED, ROW]
    assert [item["passed"] for item in document["subjects"]] == [False, True]
    assert [(item["subject"], item["kind"]) for item in document["errors"]] == [(CONTRADICTING, "usage")]
    assert document["passed"] is False


def test_priority_of_exit_codes_is_the_documented_one() -> None:
    assert [int(code) for code in PRIORITY] == [130, 3, 2, 1, 5, 0]
    assert sorted(PRIORITY) == sorted(ExitCode)
    assert worst([ExitCode.HELD, ExitCode.VIOLATED, ExitCode.NOTHING_CHECKED]) is ExitCode.VIOLATED
    assert worst([]) is ExitCode.NOTHING_CHECKED


def test_equal_seeds_give_equal_bytes_and_one_document() -> None:
    arguments = ("verify", ROW, UNREDUCED, "--seed", "7", "--world-sizes", "1,2", "--max-examples", "12", "--json")
    processes = [spawn(*arguments), spawn(*arguments)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [ExitCode.VIOLATED] * 2, outputs[0][1]
    assert outputs[0][0] == outputs[1][0]
    document = json.loads(outputs[0][0])
    assert set(document) == {"schema_version", "passed", "seed", "subjects", "errors"}
    assert document["seed"] == 7
    for subject in document["subjects"]:
        assert set(subject) == {"name", "passed", "cases_run", "world_sizes", "dtypes", "checks", "rejected", "violations"}
    for violation in document["subjects"][1]["violations"]:
        keys = {"check", "subject", "world_size", "ranks", "tensor", "message", "diagnosis", "case", "replay"}
        assert set(violation) == keys
        assert violation["replay"].startswith('tpverify replay "Case(')
    assert [line.split(":")[0] for line in outputs[0][1].splitlines()] == [ROW, "cli_subjects"]


def test_quiet_says_nothing_on_stderr_and_verbose_counts_checks() -> None:
    done = tpverify("verify", ROW, "-q", "-v", "--check", "forward", *QUICK)
    assert done.stderr == ""
    counts = next(line for line in done.stdout.splitlines() if line.startswith(f"{ROW}: "))
    assert "forward" in counts


def test_only_the_checks_asked_for_are_run() -> None:
    done = tpverify("verify", ROW, "--check", "forward", "--json", "-q", *QUICK)
    assert done.exit_code == ExitCode.HELD, done.output
    assert {check for check, count in json.loads(done.stdout)["subjects"][0]["checks"].items() if count} == {"forward"}


def test_reports_are_written_beside_the_result(tmp_path: Path) -> None:
    formats = {name: tmp_path / f"report.{name}" for name in ("text", "json", "html", "trace")}
    options = [option for name, path in formats.items() for option in ("--report", f"{name}={path}")]
    done = tpverify("verify", UNREDUCED, "--world-sizes", "2", "--json", *QUICK, *options)
    assert done.exit_code == ExitCode.VIOLATED, done.output
    assert formats["json"].read_text() == done.stdout
    assert "check failed" in formats["text"].read_text()
    assert "check failed" in formats["html"].read_text()
    assert [event["ph"] for event in json.loads(formats["trace"].read_text())["traceEvents"]] == ["M"]


def test_trace_of_a_subject_that_communicates_has_events_of_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = tpverify("verify", ROW, "--world-sizes", "1,3", *QUICK, "--report", f"trace={path}")
    assert done.exit_code == ExitCode.HELD, done.output
    assert {event["tid"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"} == {0, 1, 2}


def test_a_report_that_cannot_be_written_is_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tpverify.cli.verify.write_report", full)
    fake_verify(monkeypatch, SubjectResult(ROW, 1))
    done = tpverify("verify", ROW, "--report", f"text={tmp_path / 'report'}")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "No space left" in done.stderr


def test_ledger_shows_collectives_and_is_stable_against_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    done = tpverify("ledger", ROW, "--save", str(path))
    assert done.exit_code == ExitCode.HELD, done.output
    assert "all_reduce" in done.stdout or "reduce_scatter" in done.stdout
    same = tpverify("ledger", ROW, "--against", str(path))
    assert same.exit_code == ExitCode.HELD, same.output


def test_ledger_shows_what_differs_from_a_saved_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    assert tpverify("ledger", ROW, "--save", str(path)).exit_code == ExitCode.HELD
    saved = json.loads(path.read_text())
    gone = saved["ledger"]["records"].pop()
    path.write_text(json.dumps(saved))
    done = tpverify("ledger", ROW, "--against", str(path))
    assert done.exit_code == ExitCode.VIOLATED, done.output
    added = [line for line in done.stdout.splitlines() if line.startswith("+rank")]
    assert len(added) == 1
    assert gone["kind"] in added[0]
    other = tpverify("ledger", "column_parallel_linear", "--against", str(path))
    assert (other.exit_code, "row_parallel_linear" in other.stderr) == (ExitCode.USAGE, True)


def test_list_names_every_subject_and_check() -> None:
    done = tpverify("list")
    assert done.exit_code == ExitCode.HELD, done.output
    words = {line.split()[0] for line in done.stdout.splitlines() if line.split()}
    assert words.issuperset(verification.builtin_subjects())
    assert words.issuperset(verification.describe_checks())


def test_a_closed_pipe_is_no_internal_error() -> None:
    process = spawn("verify", ROW, *QUICK)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "internal error" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) != ExitCode.INTERNAL
