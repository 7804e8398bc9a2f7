"""The workflows are sound as far as they can be read: commands, options, files and inputs exist, jobs end, actions are pinned."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tpverify.cli import main
from tpverify.report import FORMATS

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PINNED = re.compile(r"[\w.-]+/[\w./-]+@v\d+")
SUITE = "gpu_suite/run.sh"
EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)


def workflow(name: str) -> dict[str, Any]:
    """The parsed file; YAML reads the key ``on`` as true."""
    parsed: dict[Any, Any] = yaml.safe_load(WORKFLOWS[name].read_text())
    return {"on" if key is True else str(key): value for key, value in parsed.items()}


def jobs(name: str) -> dict[str, dict[str, Any]]:
    """By name."""
    found: dict[str, dict[str, Any]] = workflow(name)["jobs"]
    return found


def steps(name: str) -> Iterator[dict[str, Any]]:
    """Of all jobs."""
    for job in jobs(name).values():
        yield from job.get("steps", [])


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell script, variables unexpanded."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"; |&&", line):
            words = shlex.split(part, comments=True)
            if words:
                yield words


def problems_of_command(words: list[str]) -> list[str]:
    """Options and files in a command that do not exist."""
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    found = []
    if words[0].startswith(".ci/") or words[0] == SUITE:
        found += [] if os.access(ROOT / words[0], os.X_OK) else [f"no program {words[0]}"]
    if words[0] == SUITE:
        found += [f"pytest gpu_suite has no {option}" for option in options if f"{option}" not in options_of_suite()]
    if Path(words[0]).name == "tpverify":
        command = main.get_command(click.Context(main), words[1])
        if command is None:
            return [f"tpverify has no {words[1]}"]
        known = {option for parameter in command.params for option in parameter.opts}
        found += [f"tpverify {words[1]} has no {option}" for option in options if option not in known]
        reports = [value for option, value in zip(words, words[1:], strict=False) if option == "--report"]
        found += [f"no report format {value}" for value in reports if value.partition("=")[0] not in FORMATS]
    return found


@cache
def options_of_suite() -> set[str]:
    """What pytest takes in gpu_suite."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "gpu_suite", "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"--[a-z][\w-]*", done.stdout))


def test_the_workflows_are_there() -> None:
    assert set(WORKFLOWS) == {"ci.yml", "gpu.yml", "gpu-subjects.yml"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_end_and_may_only_read(name: str) -> None:
    assert workflow(name)["permissions"] == {"contents": "read"}
    for job in jobs(name).values():
        assert "timeout-minutes" in job or "uses" in job


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_called_workflows_exist(name: str) -> None:
    used = [step["uses"] for step in steps(name) if "uses" in step] + [job["uses"] for job in jobs(name).values() if "uses" in job]
    for action in used:
        assert (ROOT / action).is_file() if action.startswith("./") else PINNED.fullmatch(action), action


@pytest.mark.parametrize("name", WORKFLOWS)
def test_commands_have_the_options_that_they_are_given(name: str) -> None:
    found = [problem for step in steps(name) for words in commands(step.get("run", "")) for problem in problems_of_command(words)]
    assert found == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_input_is_pasted_into_a_shell_script(name: str) -> None:
    assert [step["run"] for step in steps(name) if EXPRESSION.search(step.get("run", ""))] == []


def test_inputs_of_the_reusable_workflow_are_used_and_given() -> None:
    inputs = workflow("gpu-subjects.yml")["on"]["workflow_call"]["inputs"]
    assert set(re.findall(r"inputs\.([\w-]+)", WORKFLOWS["gpu-subjects.yml"].read_text())) == set(inputs)
    assert all(declared["description"] and ("default" in declared) != declared.get("required", False) for declared in inputs.values())
    given = set(jobs("gpu.yml")["subjects"]["with"])
    assert {key for key, declared in inputs.items() if declared.get("required")} <= given <= set(inputs)


def test_the_gpu_workflow_runs_nightly_and_by_label_and_keeps_what_failed() -> None:
    triggers = workflow("gpu.yml")["on"]
    assert triggers["pull_request"]["types"] == ["labeled", "synchronize"] and len(triggers["schedule"]) == 1
    assert "github.event.label.name == 'gpu'" in jobs("gpu.yml")["suite"]["if"]
    for name in ("gpu.yml", "gpu-subjects.yml"):
        kept = [step for step in steps(name) if step.get("uses", "").startswith("actions/upload-artifact@")]
        assert [step["if"] for step in kept] == ["failure()"]
        assert all(step["with"]["path"] == "gpu-artifacts" for step in kept)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (".venv/bin/tpverify verify mlp --wrold nccl", "tpverify verify has no --wrold"),
        ("tpverify verfy", "tpverify has no verfy"),
        ("tpverify verify --report yaml=x", "no report format yaml=x"),
        ("gpu_suite/run.sh --gpu-artefacts x", "pytest gpu_suite has no --gpu-artefacts"),
        (".ci/walk", "no program .ci/walk"),
    ],
)
def test_each_rule_can_fail(command: str, problem: str) -> None:
    assert [found for words in commands(command) for found in problems_of_command(words)] == [problem]
