"""megatron-core's mappings into and out of the tensor-parallel region, each with the adjoint that backward must be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel import mappings
from torch import Tensor, nn

from tpverify.adapters.megatron_core.environment import COMMON, begin
from tpverify.adapters.megatron_core.script import script
from tpverify.adapters.regions import REGIONS, SEQUENCE, SUMMANDS, SUMMED, MappingModule, RegionConfig, region_configs, region_mappings
from tpverify.adapters.source import Expression, called, source_of
from tpverify.sharding import Placement, Shard
from tpverify.subjects.subject import Input, Subject

MAPPINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": tp.copy_to_tensor_model_parallel_region,
    "reduce": tp.reduce_from_tensor_model_parallel_region,
    "scatter": tp.scatter_to_tensor_model_parallel_region,
    "gather": tp.gather_from_tensor_model_parallel_region,
    "scatter_sequence": tp.scatter_to_sequence_parallel_region,
    "gather_sequence": partial(tp.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False),
    "gather_sequence_to_parallel": tp.gather_from_sequence_parallel_region,
    "reduce_scatter_sequence": tp.reduce_scatter_to_sequence_parallel_region,
}

FLAT = {
    "all_gather_columns": (mappings.all_gather_last_dim_from_tensor_parallel_region, Placement(Shard(1)), SUMMED),
    "reduce_scatter_columns": (mappings.reduce_scatter_last_dim_to_tensor_parallel_region, SUMMANDS, Placement(Shard(1))),
    "all_to_all_sequence_to_columns": (mappings.all_to_all_sp2hp, SEQUENCE, Placement(Shard(1))),
    "all_to_all_columns_to_sequence": (mappings.all_to_all_hp2sp, Placement(Shard(1)), SEQUENCE),
}
"""Over [tokens, hidden], with the placements of what goes in and what comes out."""


def _flat(config: RegionConfig) -> nn.Module:
    begin()
    return MappingModule(FLAT[config.mapping][0])


@st.composite
def flat_configs(draw: st.DrawFn, world_size: int) -> RegionConfig:
    """Tokens and columns that divide."""
    sizes = st.integers(1, 3)
    return RegionConfig(draw(st.sampled_from(sorted(FLAT))), draw(sizes) * world_size, 1, draw(sizes) * world_size)


class Branches(nn.Module):
    """What a mapping is given is used once more after it, and the gradient of what it makes goes to a second branch too."""

    def __init__(self, mapping: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mapping = mapping

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """x, and z placed as the mapping's result is -> their sum, and twice x."""
        given, other = x * 1.0, z * 1.0
        return self.mapping(given) + other, given * 2.0


def _branches(config: RegionConfig) -> nn.Module:
    begin()
    return Branches(MAPPINGS[config.mapping])


def _source(module: type[nn.Module], mapping: Callable[[Tensor], Tensor]) -> str:
    function, options = (mapping.func, mapping.keywords) if isinstance(mapping, partial) else (mapping, {})
    name = f"mappings.{function.__name__}"
    given = f"lambda x: {called(name, Expression('x'), **options)}" if options else name
    return script(
        f"module = {module.__name__}({given})",
        imports="from megatron.core.tensor_parallel import mappings\nfrom torch import nn",
        definitions=(source_of(module),),
        finalized=False,
    )


SUBJECTS = {
    "mappings": region_mappings(
        "megatron_core.mappings", MAPPINGS, begin, script=lambda c: _source(MappingModule, MAPPINGS[c.mapping]), **COMMON
    ),
    "flat_mappings": Subject(
        name="megatron_core.flat_mappings",
        reference=lambda _: MappingModule(lambda x: x),
        parallel=_flat,
        configs=flat_configs,
        inputs=lambda c: {"x": Input((c.seq, c.hidden), placement=FLAT[c.mapping][1])},
        outputs=lambda c: FLAT[c.mapping][2],
        exact=True,
        script=lambda c: _source(MappingModule, FLAT[c.mapping][0]),
        **COMMON,
    ),
    "branches": Subject(
        name="megatron_core.branches",
        reference=lambda _: Branches(lambda x: x),
        parallel=_branches,
        configs=region_configs(MAPPINGS),
        inputs=lambda c: dict(
            zip("xz", (Input((c.seq, c.batch, c.hidden), placement=placement) for placement in REGIONS[c.mapping]), strict=True)
        ),
        outputs=lambda c: tuple(reversed(REGIONS[c.mapping])),
        exact=True,
        script=lambda c: _source(Branches, MAPPINGS[c.mapping]),
        **COMMON,
    ),
}
