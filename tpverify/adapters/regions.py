"""Subjects for a library's mappings into and out of the tensor-parallel region, each with the adjoint that backward must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.sharding import Partial, Placement, Replicate, Shard
from tpverify.subjects.drawing import activations
from tpverify.subjects.subject import Input, Subject

WHOLE = Placement(Replicate())
SUMMED = Placement(Replicate(), Partial())
SUMMANDS = Placement(Partial(), Replicate())
COLUMNS, SEQUENCE = Placement(Shard(2)), Placement(Shard(0))

REGIONS = {
    "copy": (WHOLE, SUMMED),
    "reduce": (SUMMANDS, WHOLE),
    "scatter": (WHOLE, COLUMNS),
    "gather": (COLUMNS, WHOLE),
    "scatter_sequence": (WHOLE, SEQUENCE),
    "gather_sequence": (SEQUENCE, WHOLE),
    "gather_sequence_to_parallel": (SEQUENCE, SUMMED),
    "reduce_scatter_sequence": (SUMMANDS, SEQUENCE),
}
"""By mapping, the placements of what goes in and what comes out. To the whole tensor each is the identity. ``copy`` hands out the
whole tensor and gets one summand of its gradient from every rank; ``reduce`` is given summands, whose gradients are whole."""


@dataclass(frozen=True)
class RegionConfig:
    """Sizes, elements, of an activation [seq, batch, hidden], and which mapping it goes through."""

    mapping: str = "copy"
    seq: int = 1
    batch: int = 1
    hidden: int = 1


class MappingModule(nn.Module):
    """One mapping."""

    def __init__(self, mapping: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mapping = mapping

    def forward(self, x: Tensor) -> Tensor:
        """The mapping of ``x`` [seq, batch, hidden], which it may work on in place."""
        # A clone on either side, so that a mapping that works in place does so on a tensor of its own.
        return self.mapping(x.clone())


def region_configs(mappings: Iterable[str]) -> Callable[[int], st.SearchStrategy[RegionConfig]]:
    """``Subject.configs`` over these of the mappings in ``REGIONS``, with sizes that divide where ranks get parts."""

    @st.composite
    def configs(draw: st.DrawFn, world_size: int) -> RegionConfig:
        mapping = draw(st.sampled_from(sorted(mappings)))
        seq, batch, _ = draw(activations(world_size, "sequence" in mapping, ()))
        columns = draw(st.integers(1, 3)) * (world_size if mapping in ("scatter", "gather") else 1)
        return RegionConfig(mapping, seq, batch, columns)

    return configs


def region_mappings(name: str, mappings: Mapping[str, Callable[[Tensor], Tensor]], begin: Callable[[], Any], **fields: Any) -> Subject:
    """A subject over all of a library's mappings.

    Args:
        name: of the subject.
        mappings: the functions, by their names in ``REGIONS``.
        begin: called on every rank before anything else.
        fields: further fields of the subject.
    """

    def parallel(config: RegionConfig) -> nn.Module:
        begin()
        return MappingModule(mappings[config.mapping])

    return Subject(
        name=name,
        reference=lambda _: MappingModule(lambda x: x),
        parallel=parallel,
        configs=region_configs(mappings),
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=REGIONS[c.mapping][0])},
        outputs=lambda c: REGIONS[c.mapping][1],
        exact=True,
        **fields,
    )
