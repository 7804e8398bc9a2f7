"""Two subjects' ledgers beside each other: equal sizes, counts by phase and kind, and what differs."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from tpverify.cli import main
from tpverify.cli.exit_codes import ExitCode
from tpverify.report.ledger_comparison import verdict


def ledgers(*arguments: str) -> Result:
    """Run ``tpverify ledger``."""
    return CliRunner().invoke(main, ["ledger", *arguments])


def rows(output: str) -> list[list[str]]:
    """The lines of the last table, in words."""
    lines = output.splitlines()
    start = max(number for number, line in enumerate(lines) if line.split()[:2] == ["phase", "collective"])
    return [line.split() for line in lines[start + 2 :] if line.strip()]


def test_what_differs_is_said() -> None:
    done = ledgers("row_parallel_linear", "column_parallel_linear")
    assert done.exit_code == ExitCode.HELD, done.output
    found = {(phase, kind): (op, *numbers) for phase, kind, op, *numbers in rows(done.output)}
    assert found["forward", "all_reduce"][1:2] == ("1",) and found["forward", "all_reduce"][-4:] == ("0", "0", "other", "count")
    assert found["backward", "all_reduce"][1:4] == ("0", "0", "1")


def test_a_subject_beside_itself_is_the_same_in_sizes_that_both_have() -> None:
    done = ledgers("mlp", "swiglu_mlp", "--world-size", "4")
    cases = re.findall(r"^Case\('(\w+)', \w+\(((?:\w+=\w+(?:, )?)*)", done.output, re.MULTILINE)
    assert [name for name, _ in cases] == ["mlp", "swiglu_mlp"]
    sizes = [{text for text in fields.split(", ") if text.partition("=")[0] in ("seq", "batch", "hidden", "ffn")} for _, fields in cases]
    assert sizes[0] and sizes[0] == sizes[1]
    assert [row[-1] for row in rows(done.output)] == ["same", "same"]
    assert [row[-1] for row in rows(ledgers("mlp", "mlp").output)] == ["same", "same"]


def test_fields_that_the_other_subject_refuses_are_its_own() -> None:
    done = ledgers("vocab_parallel_embedding", "gpt", "--world-size", "3")
    assert done.exit_code == ExitCode.HELD and "Case('gpt'" in done.output, done.output


@pytest.mark.parametrize("option", ["--save=x.json", f"--against={__file__}"])
def test_saving_is_for_one_subject(option: str) -> None:
    done = ledgers("mlp", "mlp", option)
    assert done.exit_code == ExitCode.USAGE and "with one subject but got two" in done.output


def test_counts_come_before_sizes() -> None:
    assert verdict([(1, 2), (1, 2)]) == "same"
    assert verdict([(1, 2), (1, 3)]) == "other size"
    assert verdict([(1, 2), (2, 2)]) == "other count"


def test_subjects_with_ready_made_configs_stand_beside_each_other() -> None:
    done = ledgers("cli_subjects:named", "cli_subjects:named")
    assert done.exit_code == ExitCode.HELD, done.output
    first, second = re.findall(r"^Case\(.*\)$", done.output, re.MULTILINE)
    assert first == second and "Config(" in first
