"""What collectives put on the wire: elements and bytes each rank sends under ring algorithms."""

from __future__ import annotations

from tpverify.ledger.ledger import Ledger
from tpverify.ledger.record import Record


def wire_elements(record: Record) -> float:
    """Elements that this rank sends under the bandwidth-optimal ring algorithm.

    With W ranks and a message of n elements: all_reduce 2 n (W-1)/W; all_gather, reduce_scatter and all_to_all n (W-1)/W;
    broadcast, reduce, gather, scatter, send n; recv and barrier 0 (Thakur, Rabenseifner, Gropp: Optimization of Collective
    Communication Operations in MPICH, 2005, sections 4.1 to 4.5).
    """
    world_size = len(record.group_ranks)
    share = (world_size - 1) / world_size
    factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share, "recv": 0.0, "barrier": 0.0}
    return record.elements * factor.get(record.kind, 1.0 if world_size > 1 else 0.0)


def wire_bytes(record: Record) -> float:
    """:func:`wire_elements` in bytes."""
    return wire_elements(record) * (record.nbytes / record.elements if record.elements else 0.0)


def total_wire_bytes(ledger: Ledger, rank: int) -> float:
    """Bytes that one rank sends in all collectives of a ledger."""
    return sum(wire_bytes(record) for record in ledger.rank(rank))
