"""Scripts of a case: they hold for correct code, find planted bugs, need no tpverify, and one that cannot be written is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tpverify as tpv
from tpverify.adapters.source import Expression, called, source_of
from tpverify.case import Case
from tpverify.cli import main
from tpverify.mutants.catalogue import catalogue
from tpverify.script.literals import WIDTH, Literals
from tpverify.script.source import RIGHT_HERE, script
from tpverify.session import Session
from tpverify.sharding import shard
from tpverify.strategies import cases
from tpverify.subjects.builtin import BUILTIN
from tpverify.subjects.linear_subjects import RowParallelLinearConfig

HERE = Path(__file__).parent
UNREDUCED = "Case('cli_subjects:unreduced', RowParallelLinearConfig(in_features=2, bias=False), world_size=2)"
SUBJECTS = ("row_parallel_linear", "mlp", "vocab_parallel_cross_entropy", "gpt", "dtensor_mlp")
BUGS = (
    "bias-before-reduction",  # forward
    "column-gradient-not-reduced",  # the gradient of an input
    "finalized-twice",  # of a parameter, in finalize_gradients
    "tied-gradient-doubled",  # of a tied one
    "joined-along-the-first-dimension",  # a wrong shape, from which backward cannot start
    "waited-in-backward",  # not there when forward returns
    "second-call-not-reduced",  # in the second call only
    "saved-tensor-reduced",  # a rank raises
)
PLAIN = settings(deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), derandomize=True)
SOURCE = "def build():\n    return torch.nn.Linear(1, 1)\n"


def sourced(subject: tpv.Subject, found: str) -> tpv.Subject:
    """The subject with a script that builds what it builds, by an expression that gives the subject itself."""

    def source(config: Any) -> str:
        base = subject.name if subject.name in BUILTIN else subject.name.replace("tpverify.mutants:", "")
        text = repr(Case(base if base in BUILTIN else catalogue()[base.replace("_", "-")].base, config, 1))
        return (
            "from tpverify.lookup import builtin_subjects, read_case\nfrom tpverify.mutants.catalogue import catalogue\n\n"
            f"def build():\n    return {found}.parallel(read_case({text!r})[1].config)\n\n"
            f"def finalize_gradients(module):\n    {found}.finalize_gradients(module)\n"
        )

    return dataclasses.replace(subject, script=source)


def simulated(text: str, world_size: int, context: AbstractContextManager[Any]) -> tuple[torch.Tensor, str]:
    """Run a script's ranks in the simulator: how many tensors differ on each, and what it printed."""
    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script", "exec"), space)
    wrong = torch.zeros(world_size)
    with context, contextlib.redirect_stdout(io.StringIO()) as printed:
        tpv.simulate(lambda: space["run"](dist.get_rank(), "unused", wrong), world_size)
    return wrong, printed.getvalue()


def for_cases(subject: tpv.Subject, examples: int, test: Callable[[Case], None]) -> None:
    """Run a test on cases of a subject that are computed and can be written down."""

    def of_case(case: Case) -> None:
        short = max(getattr(case.config, size, 1) for size in ("seq", "vocab")) < 100  # there are a few long ones
        if short and (subject.rejects is None or not subject.rejects(case.config, case.world_size)):
            test(case)

    settings(PLAIN, max_examples=examples)(given(cases(subject, (2, 3, 1)))(of_case))()


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_script_of_correct_code_finds_nothing(name: str) -> None:
    subject = sourced(BUILTIN[name], f"builtin_subjects()[{name!r}]")
    ran = 0

    def holds(case: Case) -> None:
        nonlocal ran
        text = script(subject, case, "simulator")
        wrong, printed = simulated(text, case.world_size, subject.context_for(case.config))
        assert not wrong.any(), printed
        assert printed.count("rank 0: ") == text.count("+= differs(") >= 2
        ran += 1

    for_cases(subject, 8, holds)
    assert ran >= 4


@pytest.mark.parametrize("bug", BUGS)
def test_the_script_of_a_planted_bug_finds_it(bug: str) -> None:
    mutant = catalogue()[bug]
    subject = sourced(mutant.subject, f"catalogue()[{bug!r}].subject")
    session = Session(subject)
    shown: list[Case] = []

    def collect(case: Case) -> None:
        if not shown and case.groups == "world" and any(violation.check == mutant.check for violation in session.run(case)):
            shown.append(case)

    for_cases(subject, 400, collect)
    text = script(subject, shown[0], "simulator")
    assert f"\n{mutant.check}: Expected " in text and "need not show" not in text
    try:
        wrong, printed = simulated(text, shown[0].world_size, subject.context_for(shown[0].config))
    except tpv.RankError:
        assert mutant.check == "execution"
    else:
        assert wrong.any() and "<-- differs" in printed


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(), (1,), (2, 3), (4, 1, 6), (0, 2), (6, 40)]),
    layout=st.sampled_from([tpv.Replicate(), tpv.Shard(0), tpv.Partial(), tpv.UnevenShard(0, "tensor_split"), tpv.PaddedShard(0, 4)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_literals_are_read_back_bit_by_bit(shape: tuple[int, ...], layout: Any, dtype: torch.dtype, world_size: int, seed: int) -> None:
    layout = layout if shape else tpv.Replicate()
    tensor = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)
    if dtype.is_floating_point and tensor.numel() > 2:
        tensor.view(-1)[:2] = torch.tensor([torch.inf, -torch.inf])
    working = dtype if dtype.is_floating_point else torch.float64
    literals = Literals(world_size, working)
    lines = literals.statement(f"value = {literals.of(tensor, layout)}")
    assert max(len(line.replace("torch.inf", "inf")) for line in lines) <= WIDTH
    before = torch.get_default_dtype()
    torch.set_default_dtype(working)
    try:
        for rank in range(world_size):
            space: dict[str, Any] = {"torch": torch, "rank": rank}
            space["part"] = lambda dim, values, rank=rank: torch.tensor(values).chunk(world_size, dim)[rank].contiguous()
            exec("\n".join(lines), space)
            assert torch.equal(space["value"], shard(tensor, layout, rank, world_size)) and space["value"].dtype == dtype
    finally:
        torch.set_default_dtype(before)


class Scaled:
    """A class whose source is borrowed."""

    factor: int = 2
    unset: int

    def __call__(self, x: float, *rest: int, **_: Any) -> float:
        """Scaled, and more."""
        total: float = x * self.factor  # of them
        return total + sum(rest)


def test_borrowed_source_is_the_same_code_without_annotations() -> None:
    text = source_of(Scaled)
    space: dict[str, Any] = {}
    exec(text, space)
    assert space["Scaled"]()(3.0, 1, more=0) == Scaled()(3.0, 1, more=0) == 7.0
    assert text.splitlines()[1] == '    """A class whose source is borrowed."""'
    assert not any(word in text for word in ("float", "int", "Any", "#"))


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.text(max_size=60) | st.integers()),
    named=st.dictionaries(st.from_regex(r"[a-z]{1,40}_", fullmatch=True), st.none() | st.booleans() | st.text(" a", max_size=30)),
)
def test_a_call_is_read_back_and_fits_its_lines(values: list[Any], named: dict[str, Any]) -> None:
    text = called("collected", *values, **named)
    assert eval(text, {"collected": lambda *given, **more: (list(given), more)}) == (values, named)
    alone = {f"    {argument}," for argument in (*map(repr, values), *(f"{name}={value!r}" for name, value in named.items()))}
    assert all(len(line) <= 116 or line in alone for line in text.splitlines())
    assert called("f", Expression("x + 1"), y=Expression("z")) == "f(x + 1, y=z)"


def tpverify(*arguments: str) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(main, list(arguments))


def on_gloo(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as its reader would, where ``cli_subjects`` can be imported."""
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_command_prints_a_program_that_shows_the_bug_on_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    done = tpverify("replay", "--script", UNREDUCED)
    assert done.exit_code == 0 and done.stderr == "", done.output
    assert "It imports cli_subjects, tpverify." in done.stdout
    assert len(done.stdout.splitlines()) < 80
    shown = on_gloo(done.stdout, tmp_path)
    assert shown.returncode == 1, shown.stderr
    assert shown.stdout.count("output: expected") == shown.stdout.count("<-- differs") == 2
    right = on_gloo(done.stdout.replace("module = build()", "module = Reduced(build())") + REDUCED, tmp_path)
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stdout.count("output: expected") == 2 and "differs" not in right.stdout


REDUCED = """

class Reduced(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.layer = layer.weight, layer

    def forward(self, x):
        partial = self.layer(x)
        total = partial.detach().clone()
        dist.all_reduce(total)
        return partial + (total - partial).detach()
"""


def row(**fields: Any) -> tpv.Subject:
    """The built-in row-parallel layer with other fields."""
    return dataclasses.replace(BUILTIN["row_parallel_linear"], **fields)


@pytest.mark.parametrize(
    ("subject", "case", "says"),
    [
        (row(), Case("row", RowParallelLinearConfig(), 1), "parallel of row_parallel_linear to be importable by module and name"),
        (row(), Case("row", RowParallelLinearConfig(), 1), "give the subject script=lambda config: SOURCE"),
        (row(script=lambda c: "x = 1"), Case("row", RowParallelLinearConfig(), 1), "to define build and finalize_gradients()"),
        (row(script=lambda c: SOURCE), Case("row", RowParallelLinearConfig(), 1), "to define finalize_gradients()"),
        (row(script=lambda c: "def"), Case("row", RowParallelLinearConfig(), 1), "to return Python source but got SyntaxError"),
        (
            row(script=lambda c: SOURCE, finalize_gradients=None),
            Case("row", RowParallelLinearConfig(batch=50, in_features=300, out_features=20), 1),
            "a case of at most 20000 numbers",
        ),
        (
            row(script=lambda c: SOURCE, finalize_gradients=None),
            Case("row", RowParallelLinearConfig(in_features=3), 2),
            "a case that is computed but got one that must be refused",
        ),
        (
            row(parallel=torch.nn.Linear, context=lambda c: contextlib.nullcontext()),
            Case("row", RowParallelLinearConfig(), 1),
            "needs no context around it",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(subject: tpv.Subject, case: Case, says: str) -> None:
    with pytest.raises(tpv.TpverifyError) as refused:
        script(subject, case, "simulator")
    assert says in str(refused.value)


@pytest.mark.parametrize("option", ["--device=cuda", "--world=nccl"])
def test_a_script_of_a_gpu_run_is_a_usage_error(option: str) -> None:
    done = tpverify("replay", "--script", option, UNREDUCED)
    assert done.exit_code == 2 and "gloo processes on CPUs" in done.output


def test_a_script_that_cannot_be_written_is_wrong_usage_with_the_way_out() -> None:
    done = tpverify("replay", "--script", "Case('row_parallel_linear', RowParallelLinearConfig(in_features=2), world_size=2)")
    assert done.exit_code == 2 and done.stdout == "", done.output
    assert "give the subject script=lambda config: SOURCE" in done.stderr and "Traceback" not in done.stderr


def test_whoever_asks_for_a_script_is_told_if_the_numbers_in_it_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr("tpverify.script.source.script", lambda *_: f'"""{RIGHT_HERE}"""')
    done = tpverify("replay", "--script", UNREDUCED)
    assert done.exit_code == 0 and done.stdout == f'"""{RIGHT_HERE}"""'
    assert "in simulation the numbers below came out right" in done.stderr
