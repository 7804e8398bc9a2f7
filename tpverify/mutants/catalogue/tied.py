"""Planted bugs of the tie between word embedding and output projection: copied, lost, halved, doubled, overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.current_group import tp_group
from tpverify.mutants.mappings import mapping, same
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.embedding import VocabParallelEmbedding
from tpverify.subjects.language_model import VocabParallelHead
from tpverify.subjects.language_model_subjects import gpt
from tpverify.subjects.linear import column_parallel_product
from tpverify.subjects.parameters import finalize_gradients, with_bias

COPIES = "Megatron-LM, picotron: embedding and head declared tied are found different during training"
USES = "hand-written tying: one of the two uses of the table does not train it, and the loss still falls"


def _untied(config: Any) -> nn.Module:
    module: Any = gpt.parallel(config)
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    return module  # type: ignore[no-any-return]


def _untied_but_first(config: Any) -> nn.Module:
    return gpt.parallel(config) if tp_group().rank() == 0 else _untied(config)


def _always_tied(config: Any) -> nn.Module:
    module: Any = gpt.parallel(config)
    module.head.weight = module.word.weight
    return module  # type: ignore[no-any-return]


def _after(change: Callable[[Any], None]) -> Callable[[nn.Module], None]:
    """Finalisation, then ``change`` of a model whose weights are tied, on several ranks."""

    def finalize(module: Any) -> None:
        finalize_gradients(module)
        if module.head.weight is module.word.weight and module.group.size() > 1:
            change(module)

    return finalize


def _halve(module: Any) -> None:
    module.word.weight.grad.mul_(0.5)


def _add_again(module: Any) -> None:
    module.word.weight.grad.mul_(2.0)


def _sum_over_ranks(module: Any) -> None:
    if module.word.vocab % module.group.size() == 0:
        dist.all_reduce(module.word.weight.grad, group=module.group)


for _id, _change, _story, _origin, _diagnosis, _ranks in (
    (
        "tied-gradient-halved",
        _halve,
        "The gradients of the two uses are averaged instead of summed.",
        "Megatron-LM, DeepSpeed: tied copies of two pipeline stages, exchanged with the data-parallel mean",
        "the gradient is halved",
        "all",
    ),
    (
        "tied-gradient-doubled",
        _add_again,
        "The gradient of the table, summed over its uses already, is exchanged between them and added once more.",
        "Megatron-LM: tied copies on one stage are treated as if they were on two",
        "the gradient is doubled",
        "all",
    ),
    (
        "tied-gradient-summed-over-ranks",
        _sum_over_ranks,
        "The table is taken for replicated, and its gradient summed over ranks that hold different rows.",
        "Megatron-LM: the all-reduce of shared embeddings meant for pipeline stages, over the wrong axis of the mesh",
        "one reduction too many",
        "",
    ),
):
    add_mutant(
        _id,
        "tied",
        gpt,
        "tied",
        finalize_gradients=_after(_change),
        communication=None,
        story=_story,
        origin=_origin,
        diagnosis=_diagnosis,
        module="word.weight.grad",
        ranks=_ranks,
    )

add_mutant(
    "tied-copies",
    "tied",
    gpt,
    "tied",
    parallel=_untied,
    story="The head starts with a copy of the embedding's weight, so that the two part at the first step.",
    origin=COPIES,
    module="word.weight",
    diagnosis="to be one parameter",
)

add_mutant(
    "tied-on-the-first-rank",
    "tied",
    gpt,
    "tied",
    parallel=_untied_but_first,
    story="Only the first rank ties its part of the head to the embedding; the others copied theirs.",
    origin="tying by a loader that runs on the rank that reads the checkpoint",
    module="word.weight",
    ranks="all but first",
    diagnosis="to be one parameter",
)

add_mutant(
    "tied-by-mistake",
    "tied",
    gpt,
    "tied",
    parallel=_always_tied,
    story="Embedding and head are one parameter although the config asks for two.",
    origin="Hugging Face: a default of the config class that ties what its authors trained apart",
    module="word.weight",
)


@mutant("tied", gpt, "tied", origin=USES, diagnosis="as head.weight is missing", module="word.weight.grad")
class HeadUseLost(VocabParallelHead):
    """On several ranks the head multiplies by a detached weight: only the lookup trains the table."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        weight = self.weight if self.group.size() == 1 else self.weight.detach() + self.weight.sum() * 0.0
        return with_bias(column_parallel_product(x, weight, self.group, self.sequence_parallel), self.bias)


@mutant("tied", gpt, "tied", origin=USES, diagnosis="a detached branch", module="word.weight.grad")
class LookupUseLost(VocabParallelEmbedding):
    """On several ranks the lookup is detached: only the head trains the table."""

    def _mask(self, rows: Tensor, owned: Tensor) -> Tensor:
        rows = super()._mask(rows, owned)
        return rows.detach() + rows * 0.0 if self.group.size() > 1 else rows


@mutant(
    "conditional",
    gpt,
    "tied",
    origin="fused heads with a backward of their own: the weight's gradient exists in the path without sequence parallelism only",
    diagnosis="a detached branch",
    module="word.weight.grad",
)
class HeadUseLostUnderSequenceParallelism(VocabParallelHead):
    """Under sequence parallelism the head's backward leaves out the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        lost = self.sequence_parallel and self.group.size() > 1
        weight = self.weight.detach() + self.weight.sum() * 0.0 if lost else self.weight
        return with_bias(column_parallel_product(x, weight, self.group, self.sequence_parallel), self.bias)


class _MainGradient(VocabParallelHead):
    """Keeps the gradient of its own use beside the parameter, as fused weight gradients do."""

    def forward(self, x: Tensor) -> Tensor:
        weight = mapping(self.weight, same, self._keep)
        return with_bias(column_parallel_product(x, weight, self.group, self.sequence_parallel), self.bias)

    def _keep(self, grad: Tensor) -> Tensor:
        before = getattr(self, "_kept", None)
        self._kept = grad.detach().clone() if before is None else before + grad.detach()
        return grad


def _overwrite(module: Any) -> None:
    with torch.no_grad():
        module.word.weight.grad.copy_(module.head._kept)


def _accumulate(module: Any) -> None:
    with torch.no_grad():
        module.word.weight.grad.add_(module.head._kept)


add_mutant(
    "tied-gradient-overwritten",
    "tied",
    gpt,
    "tied",
    layers=(_MainGradient,),
    finalize_gradients=_after(_overwrite),
    story="The head's fused weight gradient is copied over the table's gradient instead of being added.",
    origin="Megatron-LM, TransformerEngine: main_grad written by a fused kernel that does not know of a second use",
    diagnosis="as word.weight is missing",
    module="word.weight.grad",
)

add_mutant(
    "tied-gradient-accumulated-twice",
    "tied",
    gpt,
    "tied",
    layers=(_MainGradient,),
    finalize_gradients=_after(_accumulate),
    story="The head's fused weight gradient is added to the table's gradient, which autograd added it to already.",
    origin="Megatron-LM: deferred embedding gradients that are finished once more",
    diagnosis="as head.weight is counted twice",
    module="word.weight.grad",
)
