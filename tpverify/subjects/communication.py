"""Which collectives a column-parallel layer followed by a row-parallel one costs: what the subjects' ledgers must show."""

from __future__ import annotations

from tpverify.subjects.subject import Collective


def column_row(column: str, row: str, elements: int, sequence_parallel: bool) -> list[Collective]:
    """The collectives of a column-parallel layer, local work and a row-parallel layer.

    Args:
        column, row: module paths of the two layers.
        elements: of the whole activation, seq * batch * hidden.
        sequence_parallel: activations around the two layers are cut along the sequence.
    """
    if sequence_parallel:
        return [
            Collective("all_gather", "forward", column, 1, elements),
            Collective("reduce_scatter", "forward", row, 1, elements),
            Collective("all_gather", "backward", row, 1, elements),
            Collective("all_gather", "backward", column, 1, elements),  # the input, again, for the weight gradient
            Collective("reduce_scatter", "backward", column, 1, elements),
        ]
    return [
        Collective("all_reduce", "forward", row, 1, elements),
        Collective("all_reduce", "backward", column, 1, elements),
    ]


def finalization(elements: int) -> list[Collective]:
    """The one all_reduce of ``finalize_gradients`` over ``elements`` numbers of flagged parameters, or none for zero."""
    return [Collective("all_reduce", "optimizer", "*", 1, elements)] if elements else []
