"""The command line where something around the layer is wrong: a library, a name, a plan, sizes that TP does not divide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tpverify.adapters.libraries import LIBRARIES, Library
from tpverify.cli import main
from tpverify.cli.exit_codes import ExitCode
from tpverify.errors import CaseError

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)


def tpverify(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(main, list(arguments))


def table_row(output: str, distribution: str) -> str:
    """What ``tpverify list`` says about a library, on one line."""
    found = re.search(rf"^ {re.escape(distribution)} .*(?:\n  .*\S.*)*", output, re.MULTILINE)
    assert found is not None, output
    return " ".join(found.group().split())


@pytest.mark.parametrize(
    ("subject", "code", "says"),
    [
        ("right_plan", ExitCode.HELD, ""),
        ("plan_of_nothing", ExitCode.USAGE, "Expected a placement for every parameter but got none for '0.weight': add it to placements"),
        ("no_such_globals", ExitCode.USAGE, "modules that can be imported but got rank_local='no_such_package.parallel_state'"),
        ("uneven_heads", ExitCode.USAGE, "Expected 'scale' to have the local shape (2,) on rank 0 of 2, by Shard(0) of (3,), but got (1,)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Parallelize plan key")
def test_a_mistake_around_the_layer_is_named(subject: str, code: ExitCode, says: str) -> None:
    done = tpverify("verify", f"cli_wrong_subjects:{subject}", "--world-sizes", "2", "--max-examples", "5")
    assert done.exit_code == code, done.output
    assert says in done.stderr and "Traceback" not in done.output


def test_a_plan_that_names_no_module_is_shown_with_torch_s_own_words() -> None:
    done = tpverify("verify", "cli_wrong_subjects:plan_of_nothing", "--world-sizes", "2", "--max-examples", "1")
    assert "Parallelize plan key 'layers.0' could not be resolved" in done.stderr


@pytest.mark.parametrize("command", ["verify", "ledger"])
def test_a_missing_library_is_wrong_usage_and_says_how_to_install_it(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "missing", Library("missing", "no-such-distribution", "1", "2", "pip install no-such-distribution"))
    done = tpverify(command, "missing.layer")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "Expected no-such-distribution to be installed but it is not: pip install no-such-distribution" in done.stderr
    assert "missing.layer" in done.stderr or command != "verify"


def test_an_unknown_layer_of_a_library_is_wrong_usage() -> None:
    library = next((library for library in LIBRARIES.values() if library.version), None)
    if library is None:
        pytest.skip("no library that has an adapter is installed")
    layer = next(iter(library.subjects()))
    done = tpverify("verify", f"{library.name}.{layer[:-1]}")
    assert done.exit_code == ExitCode.USAGE and f"did you mean {library.name}.{layer}" in done.stderr


def test_an_untried_version_is_a_warning_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library("untried", "pytest", "0.1", "0.2", "pip install pytest")
    monkeypatch.setitem(LIBRARIES, "untried", library)
    done = tpverify("verify", "untried.layer")
    assert done.stderr.splitlines()[0] == f"tpverify: warning: tpverify has been tried with pytest 0.1 to 0.2; this is {library.version}"


def test_list_says_what_can_be_verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (
        Library("absent", "no-such-distribution", "1", "2", "pip install no-such-distribution"),
        Library("broken", "pytest", "0", "999", "pip install pytest"),
        Library("library", "click", "0.1", "0.2", "pip install click"),
        Library("description", "hypothesis", "0", "999", "pip install hypothesis"),
    ):
        monkeypatch.setitem(LIBRARIES, library.name, library)
    monkeypatch.setattr(Library, "subjects", fake_subjects)
    done = tpverify("list")
    assert done.exit_code == ExitCode.HELD, done.output
    assert table_row(done.output, "no-such-distribution") == "no-such-distribution - not installed pip install no-such-distribution"
    assert "does not import pip install pytest" in table_row(done.output, "pytest")
    assert "tried with 0.1 to 0.2 only library.layer" in table_row(done.output, "click")
    assert "usable description.layer" in table_row(done.output, "hypothesis")


def fake_subjects(library: Library) -> dict[str, Any]:
    """One layer, or an import that fails."""
    if library.name == "broken":
        raise CaseError("Expected pytest to import but it raised")
    return {"layer": None}


def test_every_library_is_an_extra_in_the_tried_version() -> None:
    section = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", (HERE.parents[1] / "pyproject.toml").read_text(), re.DOTALL)
    assert section is not None
    extras = dict(re.findall(r"^([\w-]+) = \[(.*)\]$", section.group(1), re.MULTILINE))
    installs = {library.install: f"pip install 'tpverify[{extra}]'" for library, extra in zip(LIBRARIES.values(), extras, strict=True)}
    assert list(installs) == list(installs.values())
    for library, requirements in zip(LIBRARIES.values(), extras.values(), strict=True):
        assert re.search(rf'"{library.distribution}[=>]={re.escape(library.lowest)}[",]', requirements), requirements


def test_the_summary_counts_what_was_verified_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(HERE.parent / "conftest.py"))
    here = Library("here", "pytest", "0", "999", "pip install pytest")
    libraries = {"here": here, "absent": Library("absent", "no-such-distribution", "1", "2", "pip install no-such-distribution")}
    monkeypatch.setattr(conftest, "LIBRARIES", libraries)
    ran = ["properties/upstream/test_here.py::test_a", "properties/upstream/test_here.py::test_b[x]", "properties/test_here.py::test_c"]
    held = {ran[0]: 15, ran[1]: 5, ran[2]: 100}
    assert conftest.released_libraries([*ran, "properties/upstream/test_absent.py"], held) == [
        f"upstream: pytest {here.version}: 2 tests, 20 cases held",
        "upstream: no-such-distribution is not installed, nothing of it was verified: pip install no-such-distribution",
        "upstream: 1 of 2 libraries missing",
    ]
    assert conftest.released_libraries(ran[2:], held) == []
