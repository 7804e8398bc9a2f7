"""What a subject or a call can get wrong: one clear error each, with its exit code, and the next run works."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bent_subjects import Parallel, Reference, Sizes, bent, loops_on_rank_1, parallel, raises_on_rank_1, right, verified
from click.testing import CliRunner
from hypothesis import strategies as st
from torch import nn

import tpverify as tpv
from tpverify.cli import main
from tpverify.cli.exit_codes import ExitCode
from tpverify.verification import property_test


def boom(*arguments: Any) -> Any:
    """A user's function with a bug."""
    raise KeyError("oops")


def leave(*arguments: Any) -> Any:
    """A user's function that ends the process, as if all were well."""
    sys.exit(0)


def built(forward: Callable[..., Any]) -> type[nn.Module]:
    """A reference with that forward."""
    return type("Built", (Reference,), {"forward": forward})


def also(module: type[nn.Module]) -> type[nn.Module]:
    """``module`` with one parameter more."""

    class More(module):  # type: ignore[misc,valid-type]
        def __init__(self, c: Sizes) -> None:
            super().__init__(c)
            self.extra = nn.Parameter(torch.ones(1))

    return More


ANY = (2, 2)
CONTRADICTIONS: dict[str, tuple[tpv.Subject, str]] = {
    "inputs none": (bent(inputs=lambda c: {}), "missing 1 required positional argument: 'x'"),
    "inputs None": (bent(inputs=lambda c: None), "inputs of subject bent: Expected {name: tpverify.Input} but got None"),
    "inputs list": (bent(inputs=lambda c: [tpv.Input(ANY)]), "Expected {name: tpverify.Input}"),
    "inputs shapes": (bent(inputs=lambda c: {"x": ANY}), "Expected a name and a tpverify.Input but got 'x': (2, 2)"),
    "inputs raise": (bent(inputs=boom), "Expected inputs of subject bent to answer for Sizes(features=2) but it raised KeyError: 'oops'"),
    "inputs exit": (bent(inputs=leave), "raised SystemExit"),
    "negative size": (bent(inputs=lambda c: {"x": tpv.Input((-1, 2))}), "'x' with shape=(-1, 2)"),
    "fraction": (bent(inputs=lambda c: {"x": tpv.Input((1.5, 2))}), "'x' with shape=(1.5, 2)"),  # type: ignore[arg-type]
    "dimension": (bent(inputs=lambda c: {"x": tpv.Input((1, c.features), placement=tpv.Shard(5))}), "got dim=5"),
    "configs empty": (bent(configs=st.nothing()), "to hold at least one config but none could be drawn"),
    "configs raise": (bent(configs=boom), "Expected configs of subject bent to draw for world_size=2 but it raised KeyError: 'oops'"),
    "configs raise late": (bent(configs=st.integers().map(boom)), "KeyError: 'oops'"),
    "configs exit": (bent(configs=leave), "raised SystemExit"),
    "configs invalid": (bent(configs=lambda w: st.integers(2, 1)), "to be a valid strategy but Hypothesis says"),
    "configs filtered": (bent(configs=st.just(Sizes()).filter(lambda c: False)), "none could be drawn"),
    "configs list": (bent(configs=[Sizes()]), "Expected configs to be a Hypothesis strategy"),
    "config dict": (bent(configs=st.just({"seq": 1})), "Expected a config that is a frozen dataclass but got config={'seq': 1}"),
    "config class": (bent(configs=st.just(Sizes)), "Expected a config that is a frozen dataclass"),
    "config function": (bent(configs=st.just(Sizes(seq=len))), "got config.seq=<built-in function len>"),  # type: ignore[arg-type]
    "config set": (bent(configs=st.just(Sizes(seq={"a"}))), "got config.seq={'a'} of type set"),  # type: ignore[arg-type]
    "config nested": (bent(configs=st.just(Sizes(seq=(1, torch.int8)))), "got config.seq[1]=torch.int8"),  # type: ignore[arg-type]
    "outputs count": (bent(outputs=(tpv.Replicate(),) * 2), "Expected one output placement per output of the reference but got 2"),
    "outputs": (bent(outputs="x"), "outputs of subject bent: Expected a placement"),
    "outputs raise": (bent(outputs=boom), "Expected outputs of subject bent to answer"),
    "no such parameter": (bent(placements={"weight": tpv.Shard(1), "bais": tpv.Replicate()}), "['bais'] match none of: weight"),
    "no placement": (bent(placements=None), "Expected a placement for every parameter but got none for 'weight'"),
    "other dimension": (bent(placements={"weight": tpv.Shard(0)}), "Expected 'weight' to have the local shape"),
    "no placement type": (bent(placements={"weight": 3}), "placements of subject bent: Expected a placement"),
    "placements raise": (bent(placements=boom), "Expected placements of subject bent to answer"),
    "reference raises": (bent(reference=built(boom)), "Expected the reference of bent to run but it raised KeyError: 'oops'"),
    "reference exits": (bent(reference=built(leave)), "raised SystemExit"),
    "reference object": (bent(reference=built(lambda self, x: object())), "got output of type object"),
    "reference None": (bent(reference=built(lambda self, x: (None, 3))), "to return at least one tensor but it returned none"),
    "reference function": (bent(reference=lambda c: len), "Expected reference(config) to return a torch.nn.Module"),
    "parallel function": (bent(parallel=lambda c: len), "Expected parallel(config) to return a torch.nn.Module"),
    "parallel object": (parallel(lambda self, x: object()), "got output of type object"),
    "parallel lacks": (bent(reference=also(Reference)), "Expected the parallel module to have every parameter"),
    "parallel extra": (bent(parallel=also(Parallel), placements={"*": tpv.Shard(1)}), "the reference to have every parameter"),
    "rejects raise": (bent(rejects=boom), "Expected rejects of subject bent to answer"),
    "exact raises": (bent(exact=boom), "Expected exact of subject bent to answer"),
    "communication raises": (bent(communication=boom), "Expected communication of subject bent to answer"),
    "communication": (bent(communication=lambda c, w: ["all_reduce"]), "Expected a list of tpverify.Collective"),
    "vocabulary raises": (bent(vocabulary=boom), "Expected vocabulary of subject bent to answer"),
    "vocabulary": (bent(vocabulary=lambda c: 7), "Expected a tpverify.Vocabulary but got 7"),
    "vocabulary ids": (bent(vocabulary=lambda c: tpv.Vocabulary(4, ids="idz")), "Expected the name of an input (x) but got ids='idz'"),
    "vocabulary lookup": (bent(vocabulary=lambda c: tpv.Vocabulary(4, lookup="word")), "lookup='word' to match a module's path"),
    "precision": (bent(precision="float32"), "Expected a floating-point dtype but got precision='float32'"),
    "integer precision": (bent(precision=torch.int32), "Expected a floating-point dtype but got precision=torch.int32"),
}


@pytest.mark.parametrize(("subject", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_contradiction_is_a_subject_error_that_says_what_and_the_next_run_works(subject: tpv.Subject, says: str) -> None:
    with pytest.raises(tpv.SubjectError) as error:
        verified(subject)
    assert says in str(error.value), str(error.value)
    assert verified(right, max_examples=2).passed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"world_sizes": (0,)}, "world_sizes=(0,)"),
        ({"world_sizes": ()}, "world_sizes=()"),
        ({"world_sizes": "2"}, "world_sizes='2'"),
        ({"world_sizes": 2}, "world_sizes=2"),
        ({"world_sizes": (True,)}, "world_sizes=(True,)"),
        ({"world_sizes": (2.0,)}, "world_sizes=(2.0,)"),
        ({"max_examples": -1}, "max_examples=-1"),
        ({"max_examples": 1.5}, "max_examples=1.5"),
        ({"seed": "a"}, "seed='a'"),
        ({"seed": -1}, "seed=-1"),
        ({"checks": ("forwrd",)}, "check='forwrd'"),
        ({"checks": "forward"}, "checks='forward'"),
        ({"checks": ()}, "checks=()"),
        ({"world": "glo"}, "world='glo'"),
        ({"timeout": 0}, "timeout=0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_out_of_range_is_a_case_error_that_names_it(options: dict[str, Any], says: str) -> None:
    with pytest.raises(tpv.CaseError) as error:
        verified(right, **options)
    assert says in str(error.value)


@pytest.mark.parametrize("entry", [verified, lambda s: tpv.check_case(s, tpv.Case("x", Sizes(), 1)), property_test])
@pytest.mark.parametrize("thing", ["row_parallel_linear", Parallel, None])
def test_what_is_no_subject_is_refused(entry: Callable[[Any], Any], thing: Any) -> None:
    with pytest.raises(tpv.SubjectError, match=r"Expected a tpverify\.Subject"):
        entry(thing)


def test_zero_examples_have_not_passed() -> None:
    result = verified(right, max_examples=0)
    assert (result.passed, result.cases_run, result.violations) == (False, 0, ())


@pytest.mark.parametrize(
    ("subject", "ranks", "says"),
    [
        (parallel(raises_on_rank_1), (1,), "out of luck"),
        (parallel(loops_on_rank_1), (1,), "timeout=2 seconds"),
        (parallel(lambda self, x: leave()), (0,), "SystemExit"),
        (parallel(lambda self, x: self(x)), (0,), "RecursionError"),
        (bent(finalize_gradients=boom), None, "KeyError"),
        (parallel(lambda self, x: x.add_(1)), (0,), "in-place operation"),
    ],
    ids=["raises on one rank", "loops on one rank", "exits", "recurses", "finalize raises", "writes into a leaf"],
)
def test_a_parallel_module_that_does_not_finish_violates_execution(subject: tpv.Subject, ranks: tuple[int, ...] | None, says: str) -> None:
    result = verified(subject, timeout=2.0)
    assert {violation.check for violation in result.violations} == {"execution"}
    assert says in result.violations[0].message
    assert ranks is None or result.violations[0].ranks == ranks
    assert verified(right, max_examples=2).passed


def command_line(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> Any:
    """``tpverify`` in a folder that holds the user's module ``mine``."""
    (folder / "mine.py").write_text("from bent_subjects import *\nimport sys\n" + text)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    return CliRunner().invoke(main, [*arguments, "--world-sizes", "2", "--max-examples", "5", "-q"])


@pytest.mark.parametrize(
    ("text", "name", "code"),
    [
        ("mine = right", "mine:mine", ExitCode.HELD),
        ("mine = parallel(raises_on_rank_1)", "mine:mine", ExitCode.VIOLATED),
        ("mine = bent(placements=None)", "mine:mine", ExitCode.USAGE),
        ("mine = bent(configs=st.nothing())", "mine:mine", ExitCode.USAGE),
        ("mine = bent(reference=lambda c: sys.exit(0))", "mine:mine", ExitCode.USAGE),
        ("mine = right\nsys.exit(0)", "mine:mine", ExitCode.USAGE),
        ("mine = right\nimport no_such_dependency", "mine:mine", ExitCode.USAGE),
        ("mine = right\n1 / 0", "mine:mine", ExitCode.USAGE),
        ("mine = right", "mine:mein", ExitCode.USAGE),
        ("mine = right", "mein:mine", ExitCode.USAGE),
        ("mine = right", "mine:", ExitCode.USAGE),
        ("mine = lambda: right", "mine:mine", ExitCode.USAGE),
    ],
)
def test_exit_code_of_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, code: ExitCode) -> None:
    done = command_line(tmp_path, monkeypatch, text, "verify", name)
    assert done.exit_code == code, done.output
    assert ("internal error" in done.output, "Traceback" in done.stderr) == (False, False)
    assert done.stderr.startswith(f"tpverify: {name}: ") == (code is ExitCode.USAGE)


def test_a_failure_in_a_users_file_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command_line(tmp_path, monkeypatch, "mine = parallel(raises_on_rank_1)", "verify", "mine:mine")
    case = next(line for line in done.stdout.splitlines() if line.startswith("Failing test case: ")).removeprefix("Failing test case: ")
    assert case == "Case('mine:mine', Sizes(features=2), world_size=2)"
    again = CliRunner().invoke(main, ["replay", case])
    assert (again.exit_code, "out of luck" in again.stdout) == (ExitCode.VIOLATED, True)
    (tmp_path / "mine.py").write_text("from bent_subjects import *\nmine = right\n")
    monkeypatch.delitem(sys.modules, "mine")
    assert CliRunner().invoke(main, ["replay", case]).exit_code == ExitCode.HELD


def test_public_names_are_not_hidden_by_modules() -> None:
    names = {name: getattr(tpv, name) for name in tpv.__all__}
    verified(right, max_examples=1)
    assert {name: getattr(tpv, name) for name in tpv.__all__} == names
