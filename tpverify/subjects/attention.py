"""Multi-head, grouped-query and multi-query attention with the heads cut over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.mappings import Group, copy_to_region, divide
from tpverify.subjects.parameters import INIT_STD


class QKVParallelLinear(ColumnParallelLinear):
    """The fused projection Q|K|V, cut by heads.

    With fewer key-value heads than ranks, neighbouring ranks hold the same one; each computes a part of its gradient, and
    the sum over these ranks is every one's gradient.

    Shapes: [s, b, hidden] -> [s, b, (heads + 2 * kv_heads) * head_dim] of this rank's heads.

    Raises:
        ValueError: heads do not divide, or key-value heads neither divide by the ranks nor the ranks by them.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, *, group: Group, bias: bool = True, sequence_parallel: bool = False) -> None:
        world_size, rank = group.size(), group.rank()
        width = _head_dim(hidden, heads, kv_heads)
        local_heads = divide(heads, world_size, "heads")
        sharing = _ranks_per_kv_head(kv_heads, world_size)
        local_kv_heads = max(1, kv_heads // world_size)
        first = rank // sharing * local_kv_heads
        query = range(rank * local_heads * width, (rank + 1) * local_heads * width)
        key = range((heads + first) * width, (heads + first + local_kv_heads) * width)
        value = range(key.start + kv_heads * width, key.stop + kv_heads * width)
        super().__init__(
            hidden,
            (heads + 2 * kv_heads) * width,
            group=group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            rows=[query, key, value],
        )
        self.heads, self.kv_heads, self.head_dim = local_heads, local_kv_heads, width
        self.kv_group = _sharing_group(group, sharing)

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias; those of shared key-value heads pass through f, so that their gradients are summed."""
        return self._share(self.weight), None if self.bias is None else self._share(self.bias)

    def _share(self, parameter: Tensor) -> Tensor:
        if self.kv_group is None:
            return parameter
        query = self.heads * self.head_dim
        return torch.cat([parameter[:query], copy_to_region(parameter[query:], self.kv_group)])


class ParallelAttention(nn.Module):
    """Self-attention: fused column-parallel Q|K|V, this rank's heads, row-parallel output projection.

    Args:
        kv_heads: number of key-value heads: ``heads`` (multi-head), fewer (grouped-query) or 1 (multi-query).
        causal: each token sees itself and the tokens before it only.
        output_std: standard deviation of the initial ``proj.weight``.

    Shapes: [s, b, hidden] -> the same; under sequence parallelism [s / world_size, b, hidden] -> the same.

    Raises:
        ValueError: hidden, heads or key-value heads do not divide.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        *,
        group: Group,
        causal: bool = True,
        bias: bool = True,
        sequence_parallel: bool = False,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = QKVParallelLinear(hidden, heads, kv_heads, group=group, bias=bias, sequence_parallel=sequence_parallel)
        self.proj = RowParallelLinear(hidden, hidden, group=group, bias=bias, sequence_parallel=sequence_parallel, init_std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        """Attention over the whole sequence, for this rank's heads, then the sum over all heads."""
        output: Tensor = self.proj(self._join(self._attend(*self._heads(self.qkv(x)))))
        return output

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, Q|K|V of this rank's heads] -> query, key, value, [b, heads, s, head_dim] each."""
        by_head = qkv.reshape(*qkv.shape[:-1], -1, self.qkv.head_dim).permute(1, 2, 0, 3)
        query, key, value = torch.split(by_head, [self.qkv.heads, self.qkv.kv_heads, self.qkv.kv_heads], dim=1)
        return query, self._repeat(key), self._repeat(value)

    def _repeat(self, shared: Tensor) -> Tensor:
        """A key or value for each query head."""
        return shared.repeat_interleave(self.qkv.heads // self.qkv.kv_heads, dim=1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each head's context, [b, heads, s, head_dim]."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def _join(self, context: Tensor) -> Tensor:
        """[b, heads, s, head_dim] -> [s, b, heads * head_dim]."""
        return context.permute(2, 0, 1, 3).flatten(2)


def _head_dim(hidden: int, heads: int, kv_heads: int) -> int:
    if hidden % heads:
        raise ValueError(f"Expected hidden to be divisible by heads but got hidden={hidden}, heads={heads}")
    if heads % kv_heads:
        raise ValueError(f"Expected heads to be divisible by kv_heads but got heads={heads}, kv_heads={kv_heads}")
    return hidden // heads


def _ranks_per_kv_head(kv_heads: int, world_size: int) -> int:
    if kv_heads % world_size and world_size % kv_heads:
        raise ValueError(
            "Expected kv_heads to be divisible by the TP world size, or the world size by kv_heads, "
            f"but got kv_heads={kv_heads}, world_size={world_size}"
        )
    return max(1, world_size // kv_heads)


def _sharing_group(group: Group, sharing: int) -> Group | None:
    """The ``sharing`` neighbours of ``group`` that hold this rank's key-value head; None where it is held once."""
    if sharing == 1:
        return None
    if sharing == group.size():
        return group
    start = group.rank() // sharing * sharing
    ranks = dist.get_process_group_ranks(group)[start : start + sharing]
    # Only the members meet here: other TP groups of the world may be built differently, or at another time.
    neighbours: Group = dist.new_group(ranks, use_local_synchronization=True)
    return neighbours
