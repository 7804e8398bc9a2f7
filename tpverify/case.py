"""A case: everything that determines one run, as plain data with an evaluable repr that can be read back safely."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tpverify.errors import CaseError
from tpverify.options import DTYPES

VALUES = ("normal", "integers", "edges", "one_shard", "repeated", "spike")
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")
GROUPS = ("world", "blocks", "strided")
CALLS = ("once", "twice", "interleaved")


@dataclass(frozen=True, repr=False)
class Case:
    """One run of one subject.

    Attributes:
        subject: the subject's name, built-in or ``module:attribute``.
        config: the subject's own frozen dataclass of plain values.
        world_size: TP degree; the world is larger than that when ``groups`` is not ``"world"``.
        seed: decides parameters, inputs and cotangents.
        values: how tensors are filled. ``normal``: Gaussian. ``integers``: small non-zero integers, for bitwise comparison.
            For integer inputs: ``edges`` (first and last id of every shard), ``one_shard`` (all ids owned by one rank),
            ``repeated`` (one id only). ``spike``: one huge value per row, on one shard only.
        layout: memory layout of floating-point inputs and of the cotangent.
        groups: ``world``: the TP group is the world. ``blocks`` / ``strided``: two TP groups of ``world_size`` ranks each
            run side by side with different data, on ranks [0..W) and [W..2W), or on the even and the odd ranks.
        calls: ``once``: forward and backward. ``twice``: both once more on the same module, with other inputs and, as after an
            optimizer's step, other parameter values; gradients accumulate. ``interleaved``: three calls of forward, then the
            backward of each call in the same order, as in a pipeline.
        dtype: the dtype in which modules are built, values are given and both sides compute; a subject whose ``precision`` is
            narrower keeps that.
    """

    subject: str
    config: Any
    world_size: int
    seed: int = 0
    values: str = "normal"
    layout: str = "contiguous"
    groups: str = "world"
    calls: str = "once"
    dtype: str = "float64"

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise CaseError(f"Expected a world size of at least 1 but got world_size={self.world_size!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise CaseError(f"Expected an integer but got seed={self.seed!r}")
        for name, allowed in (("values", VALUES), ("layout", LAYOUTS), ("groups", GROUPS), ("calls", CALLS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise CaseError(f"Expected one of {', '.join(allowed)} but got {name}={getattr(self, name)!r}")

    @property
    def call_count(self) -> int:
        """How often the module is called."""
        return {"once": 1, "twice": 2, "interleaved": 3}[self.calls]

    def __repr__(self) -> str:
        parts = [repr(self.subject), short_repr(self.config), f"world_size={self.world_size}"]
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"Case({', '.join(parts)})"


def call_label(name: str, call: int) -> str:
    """What a tensor of the module's call is called: by its name, and from the second call on (``call`` 1) with the call's number."""
    return f"{name} (call {call + 1})" if call else name


def without_call(label: str) -> str:
    """The label of the same tensor in the first call."""
    return re.sub(r" \(call \d+\)", "", label)


def short_repr(value: Any) -> str:
    """An evaluable repr that leaves out a dataclass's fields that have their default value; enum members as ``Class.NAME``."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value) in (tuple, list):
        inside = ", ".join(short_repr(item) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return f"{{{', '.join(f'{short_repr(key)}: {short_repr(item)}' for key, item in value.items())}}}"
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or not vars(type(value))["__dataclass_params__"].repr:
        return repr(value)
    parts = []
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.init and not (type(content) is type(field.default) and content == field.default):
            parts.append(f"{field.name}={short_repr(content)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def parse_case(text: str, config_types: Mapping[str, type]) -> Case:
    """Read back ``repr(case)`` without evaluating code.

    Args:
        text: ``Case('name', SomeConfig(...), world_size=2, ...)``; config arguments must be literals, enum members or
            nested configs.
        config_types: the dataclasses and enums that may appear, by class name.

    Raises:
        CaseError: the text is not of that form.
    """
    case = _build(_parsed(text), {**config_types, "Case": Case}, text)
    if not isinstance(case, Case):
        raise CaseError(f"Expected the text of a case, Case('subject', Config(...), world_size=N), but got {text!r}")
    return case


def subject_of(text: str) -> str:
    """The subject's name in the text of a case, read before the config's type is known."""
    tree = _parsed(text)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "Case":
        named = [keyword.value for keyword in tree.keywords if keyword.arg == "subject"]
        for node in [*tree.args[:1], *named]:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                return node.value
    raise CaseError(f"Expected the text of a case, Case('subject', Config(...), world_size=N), but got {text!r}")


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes, and nesting without end, among others
        raise CaseError(f"Expected the text of a case, Case('subject', Config(...), world_size=N), but got {text!r}") from error


def _build(node: ast.expr, types: Mapping[str, type], text: str) -> Any:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name not in types:
            known = ", ".join(sorted(types)) or "none"
            raise CaseError(f"Expected one of the classes {known} but got {name!r} in {text!r}")
        args = [_build(arg, types, text) for arg in node.args]
        if any(keyword.arg is None for keyword in node.keywords):
            raise CaseError(f"Expected arguments by name but got ** in {text!r}")
        kwargs = {str(keyword.arg): _build(keyword.value, types, text) for keyword in node.keywords}
        try:
            return types[name](*args, **kwargs)
        except CaseError:
            raise
        except Exception as error:
            raise CaseError(f"Expected arguments that {name} accepts but got {ast.unparse(node)!r}: {error}") from error
    if isinstance(node, (ast.Tuple, ast.List)):
        items = [_build(element, types, text) for element in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict) and all(node.keys):
        keys = [_build(key, types, text) for key in node.keys if key]
        try:
            return dict(zip(keys, (_build(value, types, text) for value in node.values), strict=True))
        except TypeError as error:
            raise CaseError(f"Expected keys that can be hashed but got {ast.unparse(node)!r} in {text!r}") from error
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        members = types.get(node.value.id)
        if isinstance(members, type) and issubclass(members, Enum) and node.attr in members.__members__:
            return members[node.attr]
    if ast.unparse(node) in ("inf", "-inf", "nan"):
        return float(ast.unparse(node))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise CaseError(f"Expected literals only but got {ast.unparse(node)!r} in {text!r}") from error
