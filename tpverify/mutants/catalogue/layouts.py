"""Planted bugs: fused gate|up projections cut in the wrong place, parts in the wrong order, memory read in the wrong order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.mutants.mappings import joined, mapping, summed
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.sharding import Shard
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import gather_from_region, join_sequence, scatter_to_region
from tpverify.subjects.mlp import ParallelMLP, activate, mlp_placements, swiglu_mlp

FUSED, ORDER = "fused layout", "order"

add_mutant(
    "fused-cut-contiguously",
    FUSED,
    swiglu_mlp,
    "forward",
    placements=lambda c: {**mlp_placements(c.ffn, c.activation), "*fc1.*": Shard(0)},
    story="The fused gate|up projection is cut into equal runs of rows, so that ranks hold gates only or ups only.",
    origin="Automodel, tt-forge-models: outputs hardly correlate with those of one device after some layers; with up == gate all is well",
    module="fc2*",
)

add_mutant(
    "fused-bias-cut-contiguously",
    FUSED,
    swiglu_mlp,
    "forward",
    placements=lambda c: {**({"*fc1.bias": Shard(0)} if c.bias else {}), **mlp_placements(c.ffn, c.activation)},
    story="The fused projection's weight is cut block by block, its bias in one piece.",
    origin="checkpoint converters whose list of fused tensors ends in .weight; most gated models have no bias, so nobody notices",
    module="fc1*",
)


@mutant(
    FUSED,
    swiglu_mlp,
    "forward",
    origin="checkpoints of the other convention, up|gate, loaded by the sharded path without the swap that the plain path does",
    module="fc2*",
)
class GateAndUpExchanged(ParallelMLP):
    """With several ranks the halves of the fused projection are taken for one another."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, with up for gate."""
        halves = self.fc1(x).chunk(2, -1)
        output: Tensor = self.fc2(activate(torch.cat(halves[::-1] if self.fc1.group.size() > 1 else halves, -1), self.activation))
        return output


@mutant(
    FUSED,
    swiglu_mlp,
    "forward",
    origin="DeepSpeed automatic TP: an unknown order of a fused projection is guessed; here rows that alternate",
    module="fc2*",
)
class GateAndUpInterleaved(ParallelMLP):
    """Takes every other local feature for the gate: right while a rank holds one of each."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, with alternating features."""
        features = self.fc1(x)
        step = 2 if self.fc1.group.size() > 1 else 1
        fused = torch.cat([features[..., first::step] for first in range(step)], -1)
        output: Tensor = self.fc2(activate(fused, self.activation))
        return output


@mutant(
    FUSED,
    swiglu_mlp,
    "forward",
    communication=None,
    origin="nnsight: features read from a fused projection come rank by rank, so that the first half is not the gate",
    module="fc2*",
)
class FusedPartsJoinedByRank(ParallelMLP):
    """The fused features are gathered rank by rank, gate and up of each together, and then split in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, with whole features between its layers."""
        group, features = self.fc1.group, self.fc1(x)
        whole = gather_from_region(features, -1, [features.shape[-1]] * group.size(), group)
        hidden = scatter_to_region(activate(whole, self.activation), -1, self.fc2.sizes, group)
        output: Tensor = self.fc2(hidden)
        return output


def divides_when_fused(config: Any) -> nn.Module:
    """The network, which only looks whether gate and up together divide, and leaves out what is over."""
    size = dist.get_world_size()
    fits = 2 * config.ffn % size == 0 and config.ffn >= size
    return swiglu_mlp.parallel(replace(config, ffn=config.ffn // size * size) if fits else config)


add_mutant(
    "divisibility-of-the-fused-size",
    FUSED,
    swiglu_mlp,
    "rejection",
    parallel=divides_when_fused,
    subgroups=False,
    story="Whether the sizes divide is asked of gate and up together, so that an odd ffn passes with two ranks.",
    origin="torchtitan: a fused gate|up of 2F rows admits TP degrees that divide 2F but not F",
    module="*",
    diagnosis="to be refused",
)


@mutant(
    ORDER,
    column_parallel_linear,
    "forward",
    origin="gathers into a list that is filled from the back; with equal shards every shape is right",
    diagnosis="a gather in the wrong order",
    module="output*",
)
class JoinedBackwards(ColumnParallelLinear):
    """The output features are joined from the last rank to the first."""

    def join(self, output: Tensor) -> Tensor:
        """All output features, shards reversed."""
        return torch.cat(torch.split(super().join(output), self.sizes, -1)[::-1], -1)


@mutant(
    ORDER,
    column_parallel_linear,
    "forward",
    origin="TransformerEngine: a gather along the last dimension by a primitive that concatenates along the first",
    module="output*",
    diagnosis="to have the local shape",
)
class JoinedAlongTheFirstDimension(ColumnParallelLinear):
    """Features of different ranks become tokens."""

    def join(self, output: Tensor) -> Tensor:
        """The ranks' parts, one below the other."""
        return gather_from_region(output, 0, [len(output)] * self.group.size(), self.group)


@mutant(
    ORDER,
    column_parallel_linear,
    "forward",
    origin="as before, with a reshape after it that restores the shape but not the order",
    module="output*",
)
class JoinedAndReshaped(ColumnParallelLinear):
    """The parts are concatenated along the first dimension and reshaped: right for a single token."""

    def join(self, output: Tensor) -> Tensor:
        """The elements of all parts, in the order in which they arrive."""
        if len(set(self.sizes)) > 1:
            return super().join(output)
        whole = gather_from_region(output, 0, [len(output)] * self.group.size(), self.group)
        return whole.reshape(*output.shape[:-1], -1)


@mutant(
    ORDER,
    row_parallel_linear,
    "forward",
    origin="meshes whose ranks count down: the cut of the input goes by another order than the cut of the weight",
    module="output*",
    diagnosis="in the wrong order",
)
class InputCutBackwards(RowParallelLinear):
    """A layer that cuts its input gives the first part to the last rank."""

    def forward(self, x: Tensor) -> Any:
        """The layer, of an input whose parts are reversed."""
        reverse = not self.input_is_parallel and len(set(self.sizes)) == 1
        return super().forward(torch.cat(torch.split(x, self.sizes, -1)[::-1], -1) if reverse else x)


@mutant(
    ORDER,
    row_parallel_linear,
    "forward",
    origin="reduce-scatters along a ring that stops one hop early, so that every rank ends up with its neighbour's block",
    diagnosis="parts taken in the wrong order",
    module="output*",
)
class TokensOfTheNeighbour(RowParallelLinear):
    """After the reduce-scatter each rank holds the next rank's part of the sequence."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """reduce_scatter of a sequence that is moved on by one part."""
        return super().reduce_scatter(partial.roll(-(len(partial) // self.group.size()), 0))


@mutant(
    ORDER,
    column_parallel_linear,
    "forward",
    origin="gathers of a batch-first tensor along the wrong one of two leading dimensions; invisible with one token per rank",
    diagnosis="a gather in the wrong order",
    module="output*",
)
class TokensInterleaved(ColumnParallelLinear):
    """The gathered sequence takes one token from each rank in turn, where it should take all of a rank's tokens."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, of another sequence."""
        output, size = super().multiply(x, weight), self.group.size()
        return output.reshape(size, -1, *output.shape[1:]).transpose(0, 1).flatten(0, 1) if self.sequence_parallel else output


@mutant(
    ORDER,
    row_parallel_linear,
    "forward",
    communication=None,
    origin="reduce-scatter by all_to_all and a local sum, as Ulysses-style code does, with sources and tokens transposed",
    module="output*",
)
class AllToAllTransposed(RowParallelLinear):
    """What arrives by all_to_all is summed over neighbouring tokens, not over the ranks it came from."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """all_to_all, sum / all_gather."""

        def exchanged(x: Tensor) -> Tensor:
            output = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.all_to_all_single(output, x.contiguous(), group=self.group)
            return output.view(-1, self.group.size(), *output.shape[1:]).sum(1)

        return mapping(partial, exchanged, lambda grad: join_sequence(grad.contiguous(), self.group))


@mutant(
    ORDER,
    column_parallel_linear,
    "forward",
    origin="the common trick that gives a plain gather a gradient, the own part put back into the list, at index 0",
    module="output*",
    ranks="all but first",
    diagnosis="holds the part of rank 0",
)
class OwnPartPutInFront(ColumnParallelLinear):
    """Each rank puts its own part, with its gradient, where the first rank's belongs."""

    def join(self, output: Tensor) -> Tensor:
        """all_gather without autograd; the first part is the own one."""
        if len(set(self.sizes)) > 1:
            return super().join(output)
        whole = joined(output, -1, self.group)
        return torch.cat([output, whole[..., output.shape[-1] :]], -1)


@mutant(
    "conditional",
    column_parallel_linear,
    "forward",
    origin="PyTorch: uneven shards put together from the wrong columns, the padding of the first parts cut off at the end",
    diagnosis="masked or never written",
    module="output*",
)
class PaddingCutOffAtTheEnd(ColumnParallelLinear):
    """Unequal parts travel padded and the whole is cut to size at its end: with three ranks or more, later parts are shifted."""

    def join(self, output: Tensor) -> Tensor:
        """All output features, and padding where features should be."""
        largest = max(self.sizes)
        padded = F.pad(output, [0, largest - output.shape[-1]])
        whole = gather_from_region(padded, -1, [largest] * self.group.size(), self.group)
        return whole[..., : sum(self.sizes)]


@mutant(
    ORDER,
    column_parallel_linear,
    "input-gradient",
    origin="sequence-parallel backward passes that stride over the tokens; right with one token per rank, as unit tests have it",
    module="x.grad*",
)
class GradientStrided(ColumnParallelLinear):
    """Backward of the sequence gather hands every rank each W-th token's gradient where it should be a run of tokens."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """all_gather / every W-th token of the sum, then the product."""
        if not self.sequence_parallel:
            return super().multiply(x, weight)
        rank, size = self.group.rank(), self.group.size()
        whole = mapping(x, lambda own: join_sequence(own, self.group), lambda grad: summed(grad, self.group)[rank::size].clone())
        return F.linear(whole, weight)
