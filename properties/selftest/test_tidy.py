"""The style of the code is a test: sizes, docstrings, and what is not written here."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tpverify", "properties", "gpu_suite")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.stat().st_size)
PACKAGE = [path for path in FILES if path.is_relative_to(ROOT / "tpverify")]
LINES, MEDIAN_LINES, FUNCTION_LINES = 400, 200, 70
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def name(path: Path) -> str:
    """The path as pytest shows it."""
    return path.relative_to(ROOT).as_posix()


def line_count(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_there_is_something_to_look_at() -> None:
    assert len(PACKAGE) > 10


def test_half_of_the_files_are_short() -> None:
    assert statistics.median(line_count(path) for path in PACKAGE) <= MEDIAN_LINES


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_is_tidy(path: Path) -> None:
    assert problems(path) == []


def problems(path: Path) -> list[str]:
    """What is wrong with one file, as ``line: what``."""
    text, module = path.read_text(encoding="utf-8"), tree(path)
    found = [f"{LINES}: more than {LINES} lines"] if line_count(path) > LINES else []
    docstring = ast.get_docstring(module)
    if not docstring:
        found.append("1: no module docstring")
    elif len(docstring.split("\n\n")[0].splitlines()) > 1:
        found.append("1: the module docstring's first paragraph is more than one line")
    found += [f"{number}: unfinished" for number, line in enumerate(text.splitlines(), 1) if UNFINISHED.search(line)]
    in_package, in_cli = path in PACKAGE, "cli" in path.parts
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += function_problems(node)
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{node.lineno}: bare except")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and in_package and not in_cli:
            found.append(f"{node.lineno}: print outside cli/")
    return found + (undocumented(module) if in_package else [])


def undocumented(node: ast.Module | ast.ClassDef) -> list[str]:
    """Public classes, functions and methods without a docstring."""
    found = []
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            overload = any("overload" in ast.unparse(decorator) for decorator in child.decorator_list)
            found += [] if ast.get_docstring(child) or overload else [f"{child.lineno}: {child.name} has no docstring"]
            found += undocumented(child) if isinstance(child, ast.ClassDef) else []
    return found


def function_problems(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Length and missing annotations of one function."""
    found = []
    if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES:
        found.append(f"{node.lineno}: {node.name} has more than {FUNCTION_LINES} lines")
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    bare = [argument.arg for argument in arguments if argument.annotation is None and argument.arg not in ("self", "cls")]
    if bare or node.returns is None:
        found.append(f"{node.lineno}: {node.name} is not fully annotated")
    return found


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = 1\n", "no module docstring"),
        ('"""A\nB."""\n', "more than one line"),
        ('"""A."""\n# TO' + "DO: later\n", "unfinished"),
        ('"""A."""\ntry:\n    pass\nexcept:\n    pass\n', "bare except"),
        ('"""A."""\ndef f(x) -> int:\n    return 1\n', "not fully annotated"),
        ('"""A."""\ndef f() -> int:\n' + "    x = 1\n" * 70, "more than 70 lines"),
        ('"""A."""\n' + "x = 1\n" * 400, "more than 400 lines"),
    ],
)
def test_each_rule_can_fail(code: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(code)
    assert [found for found in problems(path) if problem in found]
