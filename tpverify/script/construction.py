"""How a script builds the module under test: by the source that its subject supplies, or by importing what the subject names."""

from __future__ import annotations

import ast
import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tpverify.case import Case, short_repr
from tpverify.config import Config
from tpverify.errors import SubjectError
from tpverify.subjects.subject import Subject

WAY_OUT = "give the subject script=lambda config: SOURCE, Python source that imports what it needs and defines build()"


@dataclass(frozen=True)
class Construction:
    """Source that builds the module.

    Attributes:
        imports: import statements, one a line.
        code: definitions, among them ``build()``.
        modules: what the script imports of the user's own, for the reader's sake; empty where the subject supplied the source.
    """

    imports: tuple[str, ...]
    code: str
    modules: tuple[str, ...] = ()


def construction(subject: Subject, case: Case) -> Construction:
    """The source that builds the parallel module of one case.

    Raises:
        SubjectError: the subject has no ``script`` and what it names cannot be imported, or its source is of no use.
    """
    return _supplied(subject, case.config) if subject.script is not None else _imported(subject, case.config)


def _supplied(subject: Subject, config: Any) -> Construction:
    assert subject.script is not None
    try:
        source = textwrap.dedent(subject.script(config)).strip("\n")
        tree = ast.parse(source)
    except Exception as error:
        raise SubjectError(f"Expected script of {subject.name} to return Python source but got {type(error).__name__}: {error}") from error
    needed = {"build"} | ({"finalize_gradients"} if subject.finalize_gradients is not None else set())
    missing = sorted(needed - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)})
    if missing:
        raise SubjectError(f"Expected script of {subject.name} to define {' and '.join(missing)}() but it does not")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    lines = source.splitlines()
    taken = {number for node in imports for number in range(node.lineno - 1, node.end_lineno or node.lineno)}
    rest = "\n".join(line for number, line in enumerate(lines) if number not in taken)
    return Construction(tuple(ast.unparse(node) for node in imports), rest.strip("\n"))


def _imported(subject: Subject, config: Any) -> Construction:
    if subject.context is not None:
        raise SubjectError(f"Expected a subject whose code needs no context around it but got context of {subject.name}: {WAY_OUT}")
    parallel = _home(subject, "parallel", subject.parallel)
    imports, code = [f"import {parallel[0]}"], f"def build():\n    return {parallel[0]}.{parallel[1]}({short_repr(config)})"
    modules = [parallel[0]]
    for kind in dict.fromkeys(_classes(config)):
        if kind is Config:
            imports.append("from types import SimpleNamespace as Config")
            continue
        module, name = _home(subject, "config", kind)
        imports.append(f"from {module} import {name}")
        modules.append(module)
    if subject.finalize_gradients is not None:
        module, name = _home(subject, "finalize_gradients", subject.finalize_gradients)
        imports.append(f"import {module}")
        modules.append(module)
        code += f"\n\n\ndef finalize_gradients(module):\n    {module}.{name}(module)"
    return Construction(tuple(dict.fromkeys(imports)), code, tuple(dict.fromkeys(modules)))


def _home(subject: Subject, role: str, thing: Any) -> tuple[str, str]:
    """The module and the name under which a function or class can be imported."""
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    if module not in ("", "__main__") and name.isidentifier() and getattr(sys.modules.get(module), name, None) is thing:
        return module, name
    raise SubjectError(
        f"Expected {role} of {subject.name} to be importable by module and name but got {thing!r}: make it a named function, or {WAY_OUT}"
    )


def _classes(value: Any) -> Iterator[type]:
    """The classes that the text of a config mentions."""
    if isinstance(value, Enum):
        yield type(value)
    elif type(value) is Config:
        yield Config
        yield from _classes([item for _, item in vars(value)["_values"]])
    elif dataclasses.is_dataclass(value):
        yield type(value)
        yield from _classes([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, dict):
        yield from _classes([*value, *value.values()])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _classes(item)
