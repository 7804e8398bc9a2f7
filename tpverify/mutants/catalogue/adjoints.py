"""Planted bugs: a collective whose backward is not the adjoint of its forward, or whose replicated gradients stay apart."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.mutants.mappings import cut, mapping, part, same, summed
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.block import transformer_block
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import gather_from_region, join_sequence
from tpverify.subjects.mlp import mlp
from tpverify.subjects.parameters import finalize_gradients

MISSING = "a missing all_reduce(SUM) in backward"
TOO_MANY = "one reduction too many in backward"


@mutant(
    "wrong adjoint",
    column_parallel_linear,
    "parameter-gradient",
    origin="Megatron-LM: gradients doubled at TP=2 behind a gather that keeps its default, that tensor-parallel work follows",
    diagnosis=TOO_MANY,
    module="weight.grad*",
)
class GatherSummedInBackward(ColumnParallelLinear):
    """The backward of the output gather sums the ranks' gradients, which are one and the same, before it cuts them."""

    def join(self, output: Tensor) -> Tensor:
        """all_gather / all_reduce and cut."""
        return mapping(output, super().join, lambda grad: cut(summed(grad, self.group), self.sizes, self.group))


@mutant(
    "wrong adjoint",
    column_parallel_linear,
    "parameter-gradient",
    origin="hand-written gathers: the slice is taken from the front of the gradient, which is right on rank 0 and so passes there",
    diagnosis="parts taken in the wrong order",
    module="weight.grad*",
    ranks="all but first",
)
class GatherCutsTheFirstPart(ColumnParallelLinear):
    """The backward of the output gather gives every rank the first rank's part."""

    def join(self, output: Tensor) -> Tensor:
        """all_gather / the part at the front."""
        return mapping(output, super().join, lambda grad: grad[..., : output.shape[-1]].clone())


@mutant(
    "wrong adjoint",
    row_parallel_linear,
    "input-gradient",
    origin="layers that cut their input by indexing: autograd fills the rest of the gradient with zeros, and each rank has another rest",
    diagnosis=MISSING,
    module="x.grad*",
)
class ScatterPaddedInBackward(RowParallelLinear):
    """The input is cut by a slice, whose backward pads with zeros where the parts must be gathered."""

    def forward(self, x: Tensor) -> Any:
        """The layer, its input sliced."""
        if self.input_is_parallel:
            return super().forward(x)
        output = self.reduce(self.multiply(cut(x, self.sizes, self.group)))
        return (output, self.bias) if self.skip_bias_add else self.add_bias(output)


@mutant(
    "wrong adjoint",
    row_parallel_linear,
    "input-gradient",
    origin="nanotron: in reduce-scatter mode only 1 / TP of the input gradient is right, and the test compared outputs and weights",
    module="x.grad*",
)
class ProductGathered(RowParallelLinear):
    """Backward of the reduce-scatter: each rank multiplies its own tokens' gradient, and the products are gathered."""

    def forward(self, x: Tensor) -> Any:
        """The layer, with its input gradient put together from other ranks' weights."""
        if not self.sequence_parallel or len(set(self.sizes)) > 1 or not self.sizes[0]:
            return super().forward(x)

        def gathered(grad: Tensor) -> Tensor:
            return join_sequence(part(grad, 0, self.group), self.group)

        return super().forward(mapping(x, same, gathered))


@mutant(
    "wrong adjoint",
    row_parallel_linear,
    "parameter-gradient",
    origin="sequence-parallel layers whose reduce-scatter was written for inference and got a backward later",
    module="weight.grad*",
)
class SequenceGradientPadded(RowParallelLinear):
    """Backward of the reduce-scatter puts the rank's part of the gradient in its place, with zeros for all other tokens."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """reduce_scatter / pad."""
        rank, size = self.group.rank(), self.group.size()

        def padded(grad: Tensor) -> Tensor:
            return F.pad(grad, [0, 0] * (grad.dim() - 1) + [rank * len(grad), (size - 1 - rank) * len(grad)])

        return mapping(partial, super().reduce_scatter, padded)


@mutant(
    "wrong adjoint",
    column_parallel_linear,
    "input-gradient",
    origin="Megatron-LM forks: the gather with a replicated gradient, where work on parts of the features follows",
    module="x.grad*",
)
class SequenceGradientCut(ColumnParallelLinear):
    """Backward of the sequence gather cuts the gradient of one rank, without the sum over the ranks."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """all_gather / cut, then the product."""
        if not self.sequence_parallel:
            return super().multiply(x, weight)
        return F.linear(gather_from_region(x, 0, [len(x)] * self.group.size(), self.group), weight)


@mutant(
    "wrong adjoint",
    row_parallel_linear,
    "parameter-gradient",
    origin="all-reduces written as a mean of W times the value: the factor is undone forward, and the division stays backward",
    diagnosis="one division too many in backward",
    module="weight.grad*",
)
class ReductionGradientDivided(RowParallelLinear):
    """Backward of g divides the gradient by the number of ranks."""

    def reduce(self, partial: Tensor) -> Tensor:
        """all_reduce / divide."""
        return mapping(partial, super().reduce, lambda grad: grad / self.group.size())


@mutant(
    "wrong adjoint",
    mlp,
    "input-gradient",
    origin="torchtitan: a partial result added to a replicated one passes its gradient on as partial, and it is summed a second time",
    diagnosis=TOO_MANY,
    module="fc2*",
)
class PartialGradientSummed(RowParallelLinear):
    """The gradient of each partial result is summed over the ranks, as if it were partial as well."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand / all_reduce; of a whole sequence in either case."""
        return mapping(super().multiply(x), same, lambda grad: summed(grad, self.group))


class _UnflaggedBias(RowParallelLinear):
    def forward(self, x: Tensor) -> Any:
        bias: Any = self.bias
        if hasattr(bias, "sequence_parallel_group"):
            del bias.sequence_parallel_group
        return super().forward(x)


add_mutant(
    "bias-not-flagged",
    "replicated gradient",
    mlp,
    "parameter-gradient",
    layers=(_UnflaggedBias,),
    story="Under sequence parallelism the second layer's bias is not flagged, so its gradient stays that of the rank's own tokens.",
    origin="Speech: the trainer looks for one attribute, the layer sets another, and the list of gradients to be reduced is empty",
    diagnosis=MISSING,
    module="fc2.bias.grad*",
)


def block_without(names: tuple[str, ...]) -> Any:
    """The transformer block, with the flags of some parameters of its norms gone."""

    def parallel(config: Any) -> nn.Module:
        module = transformer_block.parallel(config)
        for name, parameter in module.named_parameters():
            if name in names and config.sequence_parallel:
                del parameter.sequence_parallel_group  # type: ignore[attr-defined]
        return module

    return parallel


add_mutant(
    "norm-biases-not-flagged",
    "replicated gradient",
    transformer_block,
    "parameter-gradient",
    parallel=block_without(("norm1.bias", "norm2.bias")),
    story="The weights of the norms are flagged for sequence parallelism; their biases are forgotten.",
    origin="Megatron-LM multi-query layers: the reduction after backward covers weights, and biases drift apart between ranks",
    diagnosis=MISSING,
    module="norm*.bias.grad*",
)


def finalize_first_only(module: nn.Module) -> None:
    """Sums the gradient of the first flagged parameter."""
    for parameter in module.parameters():
        if hasattr(parameter, "sequence_parallel_group") and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=parameter.sequence_parallel_group)
            return


add_mutant(
    "only-the-first-finalized",
    "replicated gradient",
    transformer_block,
    "parameter-gradient",
    finalize_gradients=finalize_first_only,
    story="The loop over the flagged gradients returns after the first.",
    origin="Megatron-LM: only the first model chunk's gradients are reduced",
    diagnosis=MISSING,
    module="norm*.grad*",
)


def finalize_twice(module: nn.Module) -> None:
    """Sums partial gradients, and sums the sums."""
    finalize_gradients(module)
    finalize_gradients(module)


add_mutant(
    "finalized-twice",
    "replicated gradient",
    row_parallel_linear,
    "parameter-gradient",
    finalize_gradients=finalize_twice,
    story="The partial gradients of sequence parallelism are summed by the model and by the trainer.",
    origin="gpt-neox, trainers around Megatron-style models: a hook and a loop that do the same, each unaware of the other",
    diagnosis=TOO_MANY,
    module="bias.grad*",
)


def finalize_whole_gradients(module: Any) -> None:
    """Sums the gradients of replicated biases, whole or not."""
    for name, parameter in module.named_parameters():
        if name.endswith("fc2.bias") and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=module.fc2.group)


add_mutant(
    "whole-gradients-summed",
    "replicated gradient",
    mlp,
    "parameter-gradient",
    finalize_gradients=finalize_whole_gradients,
    story="The gradients of replicated biases are summed over the ranks with and without sequence parallelism; without, they are whole.",
    origin="Automodel: one rule for all replicated parameters, where some need a sum, some a mean and some nothing",
    diagnosis=TOO_MANY,
    module="fc2.bias.grad*",
)


def finalize_as_data_parallel(module: Any) -> None:
    """Averages every gradient over the ranks, as data parallelism does."""
    finalize_gradients(module)
    group = module.fc1.group
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group)


add_mutant(
    "shards-averaged",
    "replicated gradient",
    mlp,
    "parameter-gradient",
    finalize_gradients=finalize_as_data_parallel,
    story="A data-parallel wrapper in the tensor-parallel group averages all gradients, of different shards too.",
    origin="DDP wrapped around a tensor-parallel model without a process group: shapes agree, so nothing complains",
    module="fc*.grad*",
    diagnosis="one reduction too many",
)


def finalize_off_by_an_ulp(module: Any) -> None:
    """Leaves the last rank's biases one unit in the last place from the others'."""
    finalize_gradients(module)
    group = module.fc2.group
    for name, parameter in module.named_parameters():
        if group.rank() and group.rank() == group.size() - 1 and name == "fc2.bias" and parameter.grad is not None:
            parameter.grad.mul_(1.0 + 2.0**-52)


add_mutant(
    "replicas-one-ulp-apart",
    "replicated gradient",
    mlp,
    "replication",
    finalize_gradients=finalize_off_by_an_ulp,
    story="One rank computes the gradient of a replicated parameter with a kernel that rounds otherwise.",
    origin="Paddle, Megatron-DeepSpeed: replicated parameters found to differ between ranks after long runs",
    module="fc2.bias.grad*",
    ranks="last",
)


def finalize_from_peers(module: Any) -> None:
    """Replaces replicated gradients by the sum of the others'."""
    finalize_gradients(module)
    for name, parameter in module.named_parameters():
        if name == "fc2.bias" and parameter.grad is not None and module.fc2.group.size() > 1:
            parameter.grad = summed(parameter.grad, module.fc2.group) - parameter.grad


add_mutant(
    "whole-gradients-exchanged-with-peers",
    "scale",
    mlp,
    "parameter-gradient",
    finalize_gradients=finalize_from_peers,
    story="A replicated gradient is replaced by the sum of what the other ranks have: right with two ranks, W - 1 times it with more.",
    origin="gossip-style synchronisation of replicated parameters, tested on two devices",
    diagnosis="the own rank left out",
    module="fc2.bias.grad*",
)
