"""Tensors as Python source that looks typed in: nested lists, cut by rank where ranks hold different parts."""

from __future__ import annotations

import math
import pprint
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpverify.errors import CaseError
from tpverify.sharding import Layout, Partial, Replicate, Shard, shard

MOST_NUMBERS = 20_000
"""More than anybody reads, or pastes into an issue."""

WIDTH = 120

_MARK = re.compile("\x02(\\d+)\x03")
"""Stands for a literal until the statement that holds it is known to fit a line."""


class Literals:
    """Writes the tensors of one script and counts their numbers.

    Args:
        world_size: number of ranks.
        dtype: the script's default dtype; its numbers are written with the digits that they have.

    Attributes:
        uses_part: whether the script needs a function ``part(dim, values)`` that gives a rank its shard.
    """

    def __init__(self, world_size: int, dtype: torch.dtype) -> None:
        self.world_size = world_size
        self.uses_part = False
        self._digits = None if dtype == torch.float64 else 9
        self._numbers = 0
        self._values: list[Any] = []

    def of(self, logical: torch.Tensor, layout: Layout) -> str:
        """An expression for a rank's part of a logical tensor, contiguous, to be written by :meth:`statement`; ``rank`` is its rank.

        Raises:
            CaseError: the script would hold more than ``MOST_NUMBERS`` numbers.
        """
        parts = [shard(logical, layout, rank, self.world_size) for rank in range(self.world_size)]
        if isinstance(layout, Replicate) or self.world_size == 1 or not logical.numel():
            return self._tensor(parts[0])
        if isinstance(layout, Shard) and all(part.numel() for part in parts):
            self.uses_part = True
            return f"part({layout.dim}, {self._literal(logical)})"
        if isinstance(layout, Partial) or not all(part.numel() for part in parts):
            return f"[{', '.join(self._tensor(part) for part in parts)}][rank]"
        return f"torch.tensor([{', '.join(self._literal(part) for part in parts)}][rank])"

    def statement(self, text: str) -> list[str]:
        """The lines of a statement: one if it fits, otherwise its literals stand on lines of their own."""
        indent = text[: len(text) - len(text.lstrip())]
        line = self._written(text, repr)
        if len(line) <= WIDTH:
            return [line]
        inner = indent + " " * 4

        def on_its_own(values: Any) -> str:
            if not isinstance(values, list):
                return repr(values)
            rows = ", ".join(map(repr, values))
            if len(inner) + len(rows) > WIDTH:
                rows = ",\n".join(pprint.pformat(row, width=WIDTH - len(inner), compact=True) for row in values)
            return f"[\n{textwrap.indent(rows, inner)}\n{indent}]"

        return self._written(text, on_its_own).splitlines()

    def _written(self, text: str, write: Callable[[Any], str]) -> str:
        return _MARK.sub(lambda mark: re.sub(r"\b(inf|nan)\b", r"torch.\1", write(self._values[int(mark.group(1))])), text)

    def _tensor(self, tensor: torch.Tensor) -> str:
        if not tensor.numel() or (tensor.dim() and not torch.any(tensor)):
            dtype = "" if tensor.is_floating_point() else f", dtype={tensor.dtype}"
            return f"torch.zeros({', '.join(map(str, tensor.shape))}{dtype})"
        return f"torch.tensor({self._literal(tensor)})"

    def _literal(self, tensor: torch.Tensor) -> str:
        self._numbers += tensor.numel()
        if self._numbers > MOST_NUMBERS:
            raise CaseError(
                f"Expected a case of at most {MOST_NUMBERS} numbers to write down but got more: "
                "shrink it first, as `tpverify verify` does, or choose smaller sizes"
            )
        self._values.append(self._shortened(tensor.tolist()))
        return f"\x02{len(self._values) - 1}\x03"

    def _shortened(self, values: Any) -> Any:
        if isinstance(values, list):
            return [self._shortened(value) for value in values]
        if self._digits is None or not isinstance(values, float) or not math.isfinite(values):
            return values
        return float(f"{values:.{self._digits}g}")


LAYOUTS = {
    "transposed": (
        2,
        '''
def transposed(tensor):
    """The same values, columns first in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)
''',
    ),
    "sliced": (
        1,
        '''
def sliced(tensor):
    """The same values as every other column of a larger tensor."""
    room = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), torch.nan)
    room[..., 1::2] = tensor
    return room[..., 1::2]
''',
    ),
    "expanded": (
        1,
        '''
def expanded(tensor):
    """The same values, with one row in memory."""
    return tensor[:1].expand(tensor.shape)
''',
    ),
}
"""By memory layout, the dimensions that a tensor needs to have it, and the function that gives it."""


def laid_out(expression: str, shape: Sequence[int], layout: str) -> str:
    """The expression in another memory layout, where a tensor of that shape can have it."""
    if layout not in LAYOUTS or len(shape) < LAYOUTS[layout][0]:
        return expression
    return f"{layout}({expression})"
