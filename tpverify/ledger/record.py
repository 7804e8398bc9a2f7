"""One collective as one rank issued it, with the field names of PyTorch's Flight Recorder where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CallSite:
    """A line of the user's code."""

    filename: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"


@dataclass(frozen=True)
class Record:
    """One collective, as issued by one rank.

    Attributes:
        op_id: position in this rank's ledger, from 0.
        rank: global rank.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``reduce``, ``scatter``, ``gather``,
            ``all_to_all``, ``send``, ``recv``, ``barrier``.
        process_group: (name, description) of the group.
        group_ranks: the group's global ranks, in group order.
        collective_seq_id: position among this group's collectives, from 1; 0 for send and recv.
        p2p_seq_id: position among this rank pair's point-to-point operations, from 1; 0 for collectives.
        input_sizes, output_sizes: shapes.
        input_dtypes, output_dtypes: e.g. ``float64``.
        reduce_op: ``SUM``, ..., or "" where nothing is reduced.
        root: group rank of the root (broadcast, reduce, scatter, gather) or of the peer (send, recv); None otherwise.
        phase: ``forward``, ``backward``, ``recompute``, ``optimizer`` or ``other``.
        module: path of the innermost module ("" = the root module).
        call_sites: the user's frames, innermost first.
        is_async: the call returned before the result was complete.
        nbytes: message size in bytes: the larger of all inputs and all outputs.
        elements: message size in elements, likewise.
        hazards: what this call does that a real backend may not survive (see ``ledger.ledger.HAZARDS``).
    """

    op_id: int
    rank: int
    kind: str
    process_group: tuple[str, str]
    group_ranks: tuple[int, ...]
    collective_seq_id: int
    p2p_seq_id: int
    input_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_sizes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[str, ...]
    reduce_op: str
    root: int | None
    phase: str
    module: str
    call_sites: tuple[CallSite, ...]
    is_async: bool
    nbytes: int
    elements: int
    hazards: tuple[str, ...] = ()
    payload: Any = field(default=None, compare=False, repr=False)

    @property
    def profiling_name(self) -> str:
        """Flight Recorder's name of the operation."""
        return f"sim:{self.kind}"

    @property
    def call_site(self) -> CallSite | None:
        """The innermost line of the user's code, if any is on the stack."""
        return self.call_sites[0] if self.call_sites else None

    def describe(self) -> str:
        """One line: ``all_reduce(SUM, float64[2, 3])``."""
        dtype = (self.input_dtypes or self.output_dtypes or ("",))[0]
        sizes = self.input_sizes or self.output_sizes
        shapes = ", ".join(f"{dtype}{list(size)}" for size in sizes[:3]) + (", ..." if len(sizes) > 3 else "")
        parts = [part for part in (self.reduce_op, shapes) if part]
        if self.root is not None:
            parts.append(f"{'peer' if self.kind in ('send', 'recv') else 'root'}={self.root}")
        return f"{self.kind}({', '.join(parts)})"
