"""Planted bugs: a bias or a residual that is added as often as there are ranks, or not once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from tpverify.mutants.mappings import mapping, same
from tpverify.mutants.mutant import mutant
from tpverify.subjects.block import ParallelTransformerBlock, around_residual, transformer_block
from tpverify.subjects.linear import RowParallelLinear
from tpverify.subjects.linear_subjects import row_parallel_linear
from tpverify.subjects.mlp import activate, mlp
from tpverify.subjects.parameters import with_bias

KIND = "addend counted once per rank"
PER_RANK = "added on every rank before a reduction"


class BiasAddedEarly(RowParallelLinear):
    """Adds the bias of this rank to its summand; which of it, if any, is for others to say."""

    def early(self) -> Tensor | None:
        """What this rank adds before the sum."""
        return None if self.skip_bias_add else self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, with it."""
        return with_bias(F.linear(x, self.weight), self.early())

    def add_bias(self, output: Tensor) -> Tensor:
        """Nothing is left to add."""
        return output


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="MinivLLM, Paddle, slapo: the output of a row-parallel layer is off by one bias for every rank beyond the first",
    diagnosis=PER_RANK,
    module="output*",
)
class BiasBeforeReduction(BiasAddedEarly):
    """Every rank adds the bias to its partial result, and the reduction adds up the biases as well."""


@mutant(
    KIND,
    mlp,
    "forward",
    origin="Megatron-style layers with sequence parallelism: right until it is switched on, then the loss starts too high",
    diagnosis=PER_RANK,
    module="fc2*",
)
class BiasBeforeReduceScatter(RowParallelLinear):
    """Under sequence parallelism the bias goes into the reduce-scatter, once per rank; without it, it is added once."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, the bias with it."""
        return super().reduce_scatter(with_bias(partial, self.bias))

    def add_bias(self, output: Tensor) -> Tensor:
        """Added already, or still to add."""
        return output if self.sequence_parallel else super().add_bias(output)


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="torchtitan: outputs are right, but row-parallel biases train with gradients that are too small by the TP degree",
    diagnosis="one division too many in backward",
    module="bias.grad*",
)
class BiasGradientDivided(BiasAddedEarly):
    """Every rank adds its share, bias / world size, by a division that autograd follows into the gradient."""

    def early(self) -> Tensor | None:
        """The share."""
        return None if self.skip_bias_add or self.bias is None else self.bias / self.group.size()


@mutant(
    KIND,
    row_parallel_linear,
    "replication",
    origin="loaders that keep the bias on rank 0, with layers that add it after the sum: ranks other than the first drift away",
    module="output*",
    ranks="all but first",
)
class BiasOnFirstRankAfterwards(RowParallelLinear):
    """Only the first rank adds the bias, but after the reduction, where nobody passes it on."""

    def add_bias(self, output: Tensor) -> Tensor:
        """With the bias on the first rank."""
        return super().add_bias(output) if self.group.rank() == 0 else output


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="hand-written row-parallel layers with an inverted test for rank 0: tested with two ranks, wrong with four",
    diagnosis="once too often",
    module="output*",
)
class BiasOnAllButTheFirst(BiasAddedEarly):
    """All ranks but the first add the bias before the sum, where only the first should: right with two ranks."""

    def early(self) -> Tensor | None:
        """The bias, for those who should not have it."""
        return super().early() if self.group.rank() > 0 or self.group.size() == 1 else None


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="DeepSpeed inference, FastDeploy: the bias share is taken when loading and again in the kernel, on one path only",
    module="output*",
)
class BiasShareTakenTwice(BiasAddedEarly):
    """Where the layer cuts its input itself, the bias is divided by the world size twice."""

    def early(self) -> Tensor | None:
        """The share, or the share of the share; the gradient stays whole."""
        shares = 1 if self.input_is_parallel else 2
        bias = super().early()
        return None if bias is None else mapping(bias, lambda b: b / self.group.size() ** shares, same)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="fused epilogues behind skip_bias_add: the caller adds the bias that the layer has added already, with TP only",
    diagnosis="every row holds bias",
    module="output*",
)
class BiasReturnedAndAdded(RowParallelLinear):
    """With several ranks the layer adds the bias and hands it back to be added."""

    def forward(self, x: Tensor) -> Any:
        """The output and the bias, the bias in both."""
        output = super().forward(x)
        return (with_bias(output[0], self.bias), output[1]) if isinstance(output, tuple) and self.group.size() > 1 else output


@mutant(
    KIND,
    transformer_block,
    "forward",
    origin="mirage: with two devices every block's output drifts, and the error grows from layer to layer",
    diagnosis=PER_RANK,
    module="output*",
)
class ResidualBeforeReduction(ParallelTransformerBlock):
    """A fused kernel adds the residual to the partial result of the feed-forward network, on every rank, before the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """The block, its second residual inside the reduction."""
        if self.mlp.fc1.sequence_parallel or self.arrangement != "pre_ln":
            return super().forward(x)
        x = around_residual(x, self.attention, self.norm1, self.arrangement)
        hidden = activate(self.mlp.fc1(self.norm2(x)), self.mlp.activation)
        fc2 = self.mlp.fc2
        return fc2.add_bias(fc2.reduce(fc2.multiply(hidden) + x))


def wide_enough(world_size: int) -> SearchStrategy[Any]:
    """Outputs with more numbers than there are contributions to tell apart."""
    assert callable(row_parallel_linear.configs)
    plain = {"seq": 6, "batch": 3, "bias": True, "skip_bias_add": False, "sequence_parallel": False}
    return row_parallel_linear.configs(world_size).map(lambda config: replace(config, **plain))


@mutant(
    KIND,
    row_parallel_linear,
    "contribution",
    origin="expert and sequence parallel code where half of the ranks take themselves for the first of their group, trained in bfloat16",
    module="output",
    dtype="bfloat16",
    configs=wide_enough,
    diagnosis="counts 2.00 times",
)
class BiasOnEveryOtherRank(BiasAddedEarly):
    """Every other rank adds the bias before the reduction, which four ranks then hold twice."""

    def early(self) -> Tensor | None:
        """The bias, on even ranks."""
        return super().early() if self.group.rank() % 2 == 0 else None
