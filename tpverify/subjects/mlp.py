"""Feed-forward network: column-parallel, activation, row-parallel; gate and up projections of SwiGLU are fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.sharding import Block, FusedShard, PlacementLike, Replicate, Shard
from tpverify.subjects.communication import column_row, finalization
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.mappings import Group, divide
from tpverify.subjects.parameters import INIT_STD, finalize_gradients
from tpverify.subjects.subject import Collective, Input, Subject


class ParallelMLP(nn.Module):
    """``fc2(activation(fc1(x)))`` with the ``ffn`` features cut over the ranks; local between the two layers.

    Args:
        activation: ``gelu``, ``relu`` or ``swiglu``; the last makes ``fc1`` hold gate|up, each cut by itself.
        output_std: standard deviation of the initial ``fc2.weight``.

    Shapes: [s, b, hidden] -> the same; under sequence parallelism [s / world_size, b, hidden] -> the same.

    Raises:
        ValueError: ``ffn`` does not divide by the world size.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        group: Group,
        activation: str = "gelu",
        bias: bool = True,
        sequence_parallel: bool = False,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        part = divide(ffn, group.size(), "ffn")
        gate = range(group.rank() * part, (group.rank() + 1) * part)
        up = range(ffn + gate.start, ffn + gate.stop)
        rows = [gate, up] if activation == "swiglu" else [gate]
        self.activation = activation
        self.fc1 = ColumnParallelLinear(hidden, len(rows) * ffn, group=group, bias=bias, sequence_parallel=sequence_parallel, rows=rows)
        self.fc2 = RowParallelLinear(ffn, hidden, group=group, bias=bias, sequence_parallel=sequence_parallel, init_std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """The network, token by token."""
        output: Tensor = self.fc2(activate(self.fc1(x), self.activation))
        return output


def activate(x: Tensor, activation: str) -> Tensor:
    """[..., ffn] -> the same, or for ``swiglu`` gate|up [..., 2 * ffn] -> [..., ffn]."""
    if activation == "swiglu":
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate) * up
    return F.relu(x) if activation == "relu" else F.gelu(x)


@dataclass(frozen=True)
class MLPConfig:
    """Sizes, elements, and options of a feed-forward network; its input is [seq, batch, hidden]."""

    seq: int = 1
    batch: int = 1
    hidden: int = 1
    ffn: int = 1
    activation: str = "gelu"
    bias: bool = True
    sequence_parallel: bool = False


class ReferenceMLP(nn.Module):
    """The network on one device, from ``nn.Linear``."""

    def __init__(self, hidden: int, ffn: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.fc1 = nn.Linear(hidden, 2 * ffn if activation == "swiglu" else ffn, bias=bias)
        self.fc2 = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        h = self.fc1(x)
        if self.activation == "swiglu":
            ffn = self.fc2.in_features
            h = h[..., :ffn] * torch.sigmoid(h[..., :ffn]) * h[..., ffn:]
        else:
            h = F.relu(h) if self.activation == "relu" else F.gelu(h)
        output: Tensor = self.fc2(h)
        return output


def mlp_placements(ffn: int, activation: str) -> dict[str, PlacementLike]:
    """Placements of the network's parameters wherever it sits in a model."""
    rows = FusedShard(0, (Block(ffn), Block(ffn))) if activation == "swiglu" else Shard(0)
    return {"*fc1.*": rows, "*fc2.weight": Shard(1), "*fc2.*": Replicate()}


@st.composite
def mlp_configs(draw: st.DrawFn, world_size: int, names: tuple[str, ...]) -> MLPConfig:
    """All options; an ``ffn`` that does not divide is rare, to be refused."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("ffn",), long=True))
    return MLPConfig(
        seq=seq,
        batch=batch,
        hidden=draw(st.integers(1, 6)),
        ffn=draw(divisible(world_size, flaw == "ffn")),
        activation=draw(st.sampled_from(names)),
        bias=draw(st.booleans()),
        sequence_parallel=sequence_parallel,
    )


def _communication(config: MLPConfig, world_size: int) -> list[Collective]:
    if world_size == 1:
        return []
    flagged = config.hidden if config.sequence_parallel and config.bias else 0
    messages = column_row("fc1", "fc2", config.seq * config.batch * config.hidden, config.sequence_parallel)
    return messages + finalization(flagged)


def _subject(name: str, names: tuple[str, ...]) -> Subject:
    return Subject(
        name=name,
        reference=lambda c: ReferenceMLP(c.hidden, c.ffn, c.activation, c.bias),
        parallel=lambda c: ParallelMLP(
            c.hidden, c.ffn, group=tp_group(), activation=c.activation, bias=c.bias, sequence_parallel=c.sequence_parallel
        ),
        configs=lambda world_size: mlp_configs(world_size, names),
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=Shard(0) if c.sequence_parallel else Replicate())},
        placements=lambda c: mlp_placements(c.ffn, c.activation),
        outputs=lambda c: Shard(0) if c.sequence_parallel else Replicate(),
        finalize_gradients=finalize_gradients,
        communication=_communication,
        rejects=lambda c, world_size: c.ffn % world_size != 0,
        exact=lambda c: c.activation == "relu",
        subgroups=True,
    )


mlp = _subject("mlp", ("gelu", "relu"))
swiglu_mlp = _subject("swiglu_mlp", ("swiglu",))
