"""How adapters write the source that a script builds a module with: arguments, statements, and code that is theirs already."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

WIDTH, SHORT = 116, 96
"""Of a line, and of a call that leaves room for what stands before it."""


class Expression(str):
    """Source that stands for itself among the values of a call: its ``repr`` is that source."""

    def __repr__(self) -> str:
        return str(self)


def called(function: str, *values: Any, **named: Any) -> str:
    """Source of a call, on several lines if it is long."""
    arguments = [*map(repr, values), *(f"{name}={value!r}" for name, value in named.items())]
    text = f"{function}({', '.join(arguments)})"
    if len(text) <= SHORT:
        return text
    lines: list[str] = []
    for argument in arguments:
        if lines and len(lines[-1]) + len(argument) + 2 <= WIDTH:
            lines[-1] += f" {argument},"
        else:
            lines.append(f"    {argument},")
    return "\n".join([f"{function}(", *lines, ")"])


def changed(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not the default."""
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}


def program(template: str, *statements: str, imports: str = "", definitions: tuple[str, ...] = ()) -> str:
    """Fill a template's ``{imports}``, ``{definitions}`` and, in a function, ``{statements}``."""
    body = textwrap.indent("\n".join(statement for statement in statements if statement), " " * 4).strip()
    parts = "".join(f"\n\n{definition.strip()}\n" for definition in definitions if definition)
    return template.format(imports=imports and f"\n{imports}", definitions=parts, statements=body)


def source_of(*things: Callable[..., Any]) -> str:
    """The source of classes and functions, without annotations and comments."""
    return "\n\n\n".join(ast.unparse(_Plain().visit(ast.parse(textwrap.dedent(inspect.getsource(thing))))) for thing in things)


class _Plain(ast.NodeTransformer):
    """Takes annotations away."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if node.value is None else ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)
