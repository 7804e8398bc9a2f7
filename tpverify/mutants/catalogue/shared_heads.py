"""Planted bugs: the gradients of key-value heads that several ranks hold, each with part of the queries."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.mutants.catalogue.attention import configs_with
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.attention import QKVParallelLinear
from tpverify.subjects.attention_subject import AttentionConfig, attention
from tpverify.subjects.mappings import copy_to_region

FEW_KEYS = "Megatron-LM, multi-query: training explodes after some thousand steps at TP > 1; one device is fine"


@mutant("replicated gradient", attention, "replication", origin=FEW_KEYS, module="qkv.*.grad*", diagnosis="a missing all_reduce", ranks="")
class SharedHeadsNotReduced(QKVParallelLinear):
    """Ranks that hold the same key-value head keep their own part of its gradient."""

    def _share(self, parameter: Tensor) -> Tensor:
        return parameter


@mutant(
    "replicated gradient",
    attention,
    "parameter-gradient",
    origin="Megatron-LM: the reduction of shared key-value gradients covers weights and forgets biases, which drift apart",
    module="qkv.bias.grad",
    diagnosis="a missing all_reduce",
    ranks="",
)
class SharedBiasNotReduced(QKVParallelLinear):
    """Of a shared key-value head only the weight's gradient is summed over the ranks that hold it."""

    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        return self._share(self.weight), self.bias


@mutant(
    "replicated gradient", attention, "parameter-gradient", origin=FEW_KEYS, module="qkv.*.grad", ranks="", diagnosis="a missing all_reduce"
)
class SharedValuesNotReduced(QKVParallelLinear):
    """Of a shared head only the key's gradient is summed; the value's is forgotten."""

    def _share(self, parameter: Tensor) -> Tensor:
        values = self.kv_heads * self.head_dim
        return torch.cat([super()._share(parameter)[:-values], parameter[-values:]])


@mutant("heads", attention, "parameter-gradient", origin=FEW_KEYS, module="qkv.*.grad", ranks="", diagnosis="one reduction too many")
class SharedHeadsReducedTwice(QKVParallelLinear):
    """The gradient of a shared key-value head is summed over the ranks that hold it, and then once more."""

    def _share(self, parameter: Tensor) -> Tensor:
        return super()._share(super()._share(parameter))


@mutant(
    "scale",
    attention,
    "parameter-gradient",
    origin="Automodel: replicas are averaged although each holds a summand",
    module="qkv.*.grad",
    ranks="",
    diagnosis="a missing all_reduce",
)
class SharedHeadsAveraged(QKVParallelLinear):
    """The gradient of a shared key-value head is the mean over the ranks that hold it, as if each had computed the whole."""

    def _share(self, parameter: Tensor) -> Tensor:
        if self.kv_group is None:
            return parameter
        size = self.kv_group.size()
        query = parameter[: self.heads * self.head_dim]
        shared = parameter[len(query) :]
        return torch.cat([query, copy_to_region(shared.detach() + (shared - shared.detach()) / size, self.kv_group)])


@mutant(
    "wrong group",
    attention,
    "parameter-gradient",
    origin="head replication with two layouts in use at once: neighbours here, every n-th rank there",
    module="qkv.*.grad",
    diagnosis="a wrong group",
    ranks="",
)
class HeadsSharedByEveryNthRank(QKVParallelLinear):
    """Neighbours hold the same key-value head, but its gradient is summed over every n-th rank, which hold other heads."""

    def _share(self, parameter: Tensor) -> Tensor:
        if self.kv_group is None or self.kv_group.size() == self.group.size():
            return super()._share(parameter)
        if not hasattr(self, "_strided"):
            step = self.group.size() // self.kv_group.size()
            ranks = dist.get_process_group_ranks(self.group)[self.group.rank() % step :: step]
            self._strided = dist.new_group(ranks, use_local_synchronization=True)
        query = self.heads * self.head_dim
        return torch.cat([parameter[:query], copy_to_region(parameter[query:], self._strided)])


def shared_by_group_ranks(config: AttentionConfig) -> nn.Module:
    """Attention whose ranks take their number within the TP group for their number in the world."""
    module: Any = attention.parallel(config)
    if module.qkv.kv_group is not None:
        sharing = module.qkv.kv_group.size()
        start = module.qkv.group.rank() // sharing * sharing
        ranks = list(range(start, start + sharing))
        module.qkv.kv_group = dist.new_group(ranks, use_local_synchronization=True) if dist.get_rank() in ranks else None
    return module  # type: ignore[no-any-return]


add_mutant(
    "heads-shared-by-group-ranks",
    "wrong group",
    attention,
    "parameter-gradient",
    parallel=shared_by_group_ranks,
    configs=lambda world_size: configs_with(world_size, kv_heads=1),
    story="The group that shares a key-value head is built from ranks within the TP group, which are taken for global ones.",
    origin="Megatron-LM, DeepSpeed: group ranks and global ranks confused; fine as long as the TP group is the world",
    diagnosis="a wrong group",
    module="qkv.*.grad",
    ranks="",
)


@mutant(
    "conditional",
    attention,
    "parameter-gradient",
    origin="code that tests for multi-query by the local number of heads",
    module="qkv.*.grad",
    ranks="",
)
class SharingOnlyForMultiQuery(QKVParallelLinear):
    """Gradients of shared heads are summed if there is one key-value head in all, and not if each rank's one head is shared by some."""

    def _share(self, parameter: Tensor) -> Tensor:
        return super()._share(parameter) if self.kv_group is self.group else parameter
