"""``tpverify mutants`` as scripts see it: exit codes, one document, the same document for any number of processes, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_mutants_campaign import SURVIVED, campaign, fate

from tpverify.cli import main
from tpverify.cli.exit_codes import ExitCode
from tpverify.mutants import campaign as campaigns
from tpverify.mutants.catalogue import catalogue
from tpverify.mutants.controls import controls
from tpverify.mutants.outcome import Trouble

HERE = Path(__file__).parent
FEW = "rows-"
"""In the ids of a few mutants of one small subject."""


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def tpverify(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, ["mutants", *arguments])


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    command = [sys.executable, "-c", "from tpverify.cli import main; main(prog_name='tpverify')", "mutants", *arguments]
    return subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def some(count: int = 2) -> list[str]:
    """Ids of the first mutants of a linear layer."""
    return [id for id, mutant in catalogue().items() if mutant.base == "row_parallel_linear" and not mutant.equivalent][:count]


def without_seconds(text: str) -> str:
    """A document without what time it took."""
    return re.sub(r'"seconds": [\d.]+', "", text)


def test_a_killed_mutant_is_0_and_can_be_replayed() -> None:
    (id,) = some(1)
    done = tpverify("-k", id, "--jobs", "1")
    assert done.exit_code == ExitCode.HELD, done.output
    assert "killed by their named check (100.0 %)" in done.stdout.splitlines()[-1]
    document = json.loads(tpverify("-k", id, "--jobs", "1", "--json", "-q").stdout)
    assert document["passed"] is True and document["score"] == 100.0
    mutant = document["mutants"][0]
    assert (mutant["id"], mutant["status"], mutant["killed_by"]) == (id, "killed", mutant["expected_check"])
    again = CliRunner().invoke(main, ["replay", mutant["case"]])
    assert again.exit_code == ExitCode.VIOLATED, again.output
    assert f"{mutant['expected_check']} check failed" in again.stdout


def test_a_terminal_that_knows_ascii_only_gets_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    done = spawn("-k", some(1)[0], "--jobs", "1", "-v")
    stdout, stderr = done.communicate(timeout=120)
    assert done.returncode == ExitCode.HELD, stderr
    assert stdout.isascii() and "* the check that must kill it, o others that fired as well, x the named check did not fire" in stdout


def test_the_document_is_the_same_for_any_number_of_processes() -> None:
    assert len([id for id in catalogue() if FEW in id]) >= 2
    processes = [spawn("-k", FEW, "--json", "--jobs", jobs) for jobs in ("1", "3")]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [processes[0].returncode] * 2
    assert json.loads(outputs[0][0])["mutants"]
    assert without_seconds(outputs[0][0]) == without_seconds(outputs[1][0])


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (campaign(fate("a")), ExitCode.HELD),
        (campaign(fate("a"), fate("b", **SURVIVED)), ExitCode.VIOLATED),
        (campaign(fate("a", killed_by="buffers")), ExitCode.VIOLATED),
        (campaign(fate("a"), troubles=(Trouble("b", "KeyError: 'x'", "in somewhere\n"),)), ExitCode.INTERNAL),
    ],
    ids=["held", "survivor", "wrong check", "internal"],
)
def test_the_exit_code_is_that_of_the_worst(made: Any, code: ExitCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "run", lambda mutants, **options: made)
    done = tpverify("-q")
    assert done.exit_code == code
    if code is ExitCode.INTERNAL:
        assert done.stderr == "tpverify: internal error: b: KeyError: 'x' (-v shows the traceback)\n"
        assert "in somewhere" in tpverify("-q", "-v").stderr


def test_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[dict[str, Any], bool]] = []

    def run(mutants: dict[str, Any], **options: Any) -> Any:
        asked.append((mutants, options["whole"]))
        return campaign(fate("a"))

    monkeypatch.setattr(campaigns, "run", run)
    for arguments in ((), ("-k", "WRONG REDUCE"), ("--subject", "mlp"), ("-k", "wrong reduce", "--subject", "mlp")):
        tpverify(*arguments)
    everything, of_kind, of_subject, of_both = (mutants for mutants, _ in asked)
    assert [whole for _, whole in asked] == [True, False, False, False]
    assert everything == catalogue()
    assert {mutant.kind for mutant in of_kind.values()} == {"wrong reduce op"}
    assert {mutant.base for mutant in of_subject.values()} == {"mlp"}
    assert set(of_both) == set(of_kind) & set(of_subject)


def test_nothing_selected_is_5() -> None:
    done = tpverify("-k", "no such kind")
    assert (done.exit_code, done.stdout) == (ExitCode.NOTHING_CHECKED, "")
    assert "no mutant of any subject matches 'no such kind'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--subject", "row_paralel_linear"), "did you mean row_parallel_linear"),
        (("--subject", "no_such_module:subject"), "no_such_module"),
        (("--subject", "cli_subjects:unreduced", "-k", "order"), "-k"),
        (("--jobs", "0"), "0"),
    ],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...], says: str) -> None:
    done = tpverify(*arguments)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert says in done.stderr


def test_of_another_subject_its_own_collectives_are_made_to_fail() -> None:
    done = tpverify("--subject", "tpverify.subjects.linear_subjects:row_parallel_linear", "--max-examples", "4", "--json", "-q")
    assert done.exit_code in (ExitCode.HELD, ExitCode.VIOLATED), done.output
    document = json.loads(done.stdout)
    assert document["sites"] and document["perturbed"] > 0


def test_interrupted_is_130_and_leaves_no_process() -> None:
    process = spawn("--jobs", "2")
    assert process.stderr is not None
    assert re.fullmatch(r"tpverify: \d+ mutants, 2 processes\n", process.stderr.readline())
    time.sleep(10)  # some have had their turn
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert "mutants killed by their named check" in stdout
    assert process.returncode == ExitCode.INTERRUPTED, stderr
    assert "Traceback" not in stderr and "interrupted" in stderr


def test_list_counts_mutants_by_kind_and_verbose_names_each() -> None:
    short, full = (CliRunner().invoke(main, ["list", *options]).stdout for options in ((), ("-v",)))
    assert all(mutant.kind in short for mutant in catalogue().values())
    assert all(f" {id} " in f" {full} " for id in (*catalogue(), *controls()))


def test_only_who_asks_for_mutants_imports_them() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom tpverify.cli import main\n"
        "done = CliRunner().invoke(main, ['verify', 'row_parallel_linear', '--max-examples', '1'])\n"
        "print(done.exit_code, sorted(name for name in sys.modules if name.startswith('tpverify.mutants')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "0 []\n"
