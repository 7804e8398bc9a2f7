"""The option for working dtypes, on the command line, in pytest and in the environment; and what a report says about them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import tpverify as tpv
from tpverify import strategies, verification
from tpverify.cli import main
from tpverify.cli.exit_codes import ExitCode
from tpverify.errors import CaseError
from tpverify.lookup import builtin_subjects
from tpverify.options import parse_dtypes
from tpverify.report.report import Report, result_from_dict
from tpverify.report.text import closing_line, write_text
from tpverify.result import Result

ROW = builtin_subjects()["row_parallel_linear"]


def test_dtypes_are_read_in_their_own_order_and_once() -> None:
    assert parse_dtypes("bfloat16, float64,bfloat16") == ("float64", "bfloat16")
    for text in ("", "float64,", "bf16", "float65"):
        with pytest.raises(CaseError, match="Expected one or more of float64, float32, bfloat16, float16 but got"):
            parse_dtypes(text)


def test_the_command_line_draws_from_the_dtypes_and_counts_them() -> None:
    arguments = ["verify", ROW.name, "--max-examples", "12", "--world-sizes", "2", "--dtypes", "bfloat16,float64"]
    done = CliRunner().invoke(main, [*arguments, "--json", "-q"])
    assert done.exit_code == ExitCode.HELD, done.output
    subject = json.loads(done.stdout)["subjects"][0]
    assert set(subject["dtypes"]) == {"float64", "bfloat16"} and sum(subject["dtypes"].values()) == subject["cases_run"]
    assert CliRunner().invoke(main, ["verify", ROW.name, "--dtypes", "half"]).exit_code == ExitCode.USAGE


def test_a_report_speaks_of_dtypes_only_where_there_is_another_than_float64() -> None:
    usual = Result("a", 5, {2: 5}, {"forward": 5}, dtypes={"float64": 5})
    mixed = Result("b", 7, {2: 7}, {"forward": 7}, dtypes={"float64": 3, "bfloat16": 4})
    assert "dtypes" not in write_text(Report((usual,))) and "float64" not in closing_line(Report((usual,)))
    text = write_text(Report((usual, mixed)))
    assert "float64 3, bfloat16 4" in text
    assert closing_line(Report((usual, mixed))).startswith("2 subjects, 12 cases (float64 8, bfloat16 4), ")
    assert result_from_dict(mixed.as_dict()).dtypes == mixed.dtypes


def test_property_tests_draw_from_the_dtypes_of_the_environment_unless_they_name_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    cases = strategies.cases

    def watched(*args: object, **options: object) -> object:
        seen.append(tuple(options["dtypes"]))  # type: ignore[arg-type]
        return cases(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "cases", watched)
    tpv.property_test(ROW)
    monkeypatch.setenv("TPVERIFY_DTYPES", "bfloat16,float32")
    tpv.property_test(ROW)
    tpv.property_test(ROW, dtypes=("float16",))
    assert seen == [("float64",), ("float32", "bfloat16"), ("float16",)]


def test_pytest_hands_its_dtypes_to_the_environment(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import os\n\ndef test_it():\n    assert os.environ['TPVERIFY_DTYPES'] == 'float32'\n")
    pytester.runpytest_subprocess("--tpverify-dtypes", "float32").assert_outcomes(passed=1)
    assert pytester.runpytest_subprocess("--tpverify-dtypes", "float33").ret == pytest.ExitCode.USAGE_ERROR
