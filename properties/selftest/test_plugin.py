"""The pytest plugin: options, failure reports, results through xdist and JUnit, summary and report files."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tpverify.options import WORLD_SIZES_VARIABLE

PROPERTIES = """
    from hypothesis import settings

    import torch

    import cli_subjects
    import tpverify as tpv
    from tpverify.subjects.builtin import BUILTIN
    torch.set_num_threads(1)
    settings.register_profile("plugin", max_examples=8, deadline=None, database=None, derandomize=True)
    settings.load_profile("plugin")

    test_row = tpv.property_test(BUILTIN["row_parallel_linear"])
    test_unreduced = tpv.property_test(cli_subjects.unreduced)

    def test_plain():
        assert True
"""
SUMMARY = re.compile(r"^tpverify: 2 properties, (\d+) cases, world sizes 1, 2; (\d+) violations$", re.MULTILINE)


@pytest.fixture
def properties(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with one property that holds, one that does not, and a plain test."""
    pytester.makepyfile(test_properties=PROPERTIES)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return pytester


@pytest.fixture
def stand_in(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with a plain test and one that fails as a property does, without the time that importing torch takes."""
    pytester.makepyfile(
        test_stand_in="""
        import sys
        import types

        class CheckFailed(AssertionError):
            pass

        sys.modules["tpverify.verification"] = types.SimpleNamespace(pending_results=[], CheckFailed=CheckFailed)

        def deep_inside():
            raise CheckFailed("the failure report")

        def test_property():
            deep_inside()

        def test_plain():
            assert True
        """
    )
    return pytester


def document(path: Path) -> dict[str, dict[str, object]]:
    """The subjects of a JSON report, by name."""
    return {subject["name"]: subject for subject in json.loads(path.read_text())["subjects"]}


@pytest.mark.parametrize("processes", ["0", "2"], ids=["one process", "xdist"])
def test_results_reach_the_summary_the_reports_and_the_reader(properties: pytest.Pytester, processes: str) -> None:
    report, junit = properties.path / "report.json", properties.path / "junit.xml"
    arguments = ("-n", processes, "--tpverify-world-sizes", "1,2", f"--tpverify-report=json={report}", f"--junitxml={junit}")
    done = properties.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    done.assert_outcomes(passed=2, failed=1)
    summary = SUMMARY.findall(done.stdout.str())
    assert len(summary) == 1, done.stdout.str()
    subjects = document(report)
    assert {name: subject["passed"] for name, subject in subjects.items()} == {"row_parallel_linear": True, "cli_subjects:unreduced": False}
    assert {size for subject in subjects.values() for size in subject["world_sizes"]} == {"1", "2"}
    assert int(summary[0][0]) == sum(subject["cases_run"] for subject in subjects.values())
    assert int(summary[0][1]) == sum(len(subject["violations"]) for subject in subjects.values()) > 0
    carried = [node.get("value") or "" for node in ElementTree.parse(junit).iter("property") if node.get("name") == "tpverify"]
    assert {json.loads(value)["name"] for value in carried} == set(subjects)
    done.stdout.re_match_lines([r"tpverify: \w+ check failed: cli_subjects:unreduced, world_size=2, ranks 0 and 1"])
    done.stdout.fnmatch_lines(["Failing test case: Case(*", "Replay: tpverify replay *Case(*"])
    assert "verification.py:" not in done.stdout.str()
    assert "hypothesis/" not in done.stdout.str()


def test_frames_are_shown_when_asked_for(stand_in: pytest.Pytester) -> None:
    plain = stand_in.runpytest_subprocess()
    plain.assert_outcomes(passed=1, failed=1)
    assert "the failure report" in plain.stdout.str()
    assert "deep_inside" not in plain.stdout.str()
    assert "deep_inside" in stand_in.runpytest_subprocess("--tb", "native").stdout.str()
    assert "deep_inside" in stand_in.runpytest_subprocess("--full-trace").stdout.str()


def test_no_summary_and_nothing_passed_without_properties(stand_in: pytest.Pytester) -> None:
    report = stand_in.path / "report.json"
    done = stand_in.runpytest_subprocess("-k", "plain", f"--tpverify-report=json={report}")
    done.assert_outcomes(passed=1)
    assert "properties," not in done.stdout.str()
    assert json.loads(report.read_text())["passed"] is False


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--tpverify-world-sizes=0", "at least 1"),
        ("--tpverify-report=htm=x", "did you mean html"),
        ("--tpverify-report=trace=x", "tpverify verify --report trace=PATH"),
        ("--tpverify-world=cuda", "invalid choice"),
    ],
)
def test_a_wrong_option_is_a_usage_error(pytester: pytest.Pytester, option: str, says: str) -> None:
    done = pytester.runpytest("-p", "no:cacheprovider", option)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert says in done.stderr.str()


def test_the_environment_is_restored(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORLD_SIZES_VARIABLE, "3")
    pytester.makepyfile(
        f"""
        import os

        def test_environment():
            assert os.environ[{WORLD_SIZES_VARIABLE!r}] == "1,2"
        """
    )
    pytester.runpytest("-p", "no:cacheprovider", "--tpverify-world-sizes", "1,2").assert_outcomes(passed=1)
    assert os.environ[WORLD_SIZES_VARIABLE] == "3"
