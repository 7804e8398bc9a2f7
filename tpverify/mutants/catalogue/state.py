"""Planted bugs: something is kept between calls that belongs to one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import all_gather_single, mapping, same, summed
from tpverify.mutants.mutant import mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import apply, join_sequence, sum_and_cut_sequence
from tpverify.subjects.mlp import ParallelMLP, activate, mlp

KIND = "state"
STALE = "stale"


class _ProductOfTheLastInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer, layer.last = layer, x.detach()
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad @ ctx.saved_tensors[0], grad.flatten(0, -2).t() @ ctx.layer.last.flatten(0, -2), None


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="symmetric-memory and CUDA-graph code that hands out its static output buffer: right until the next call",
    diagnosis=STALE,
    module="output*",
)
class OutputBufferKept(RowParallelLinear):
    """The sum is written to a buffer that the layer keeps, and the next call overwrites what it returned before."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, into the one buffer."""

        def into_buffer(x: Tensor) -> Tensor:
            if getattr(self, "buffer", x.new_empty(0)).shape != x.shape:
                self.buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.all_reduce(self.buffer.copy_(x), group=self.group)
            return self.buffer.data

        return super().reduce(partial) if self.group.size() == 1 else mapping(partial, into_buffer, same)


@mutant(
    KIND,
    column_parallel_linear,
    "forward",
    origin="PyTorch sharding caches with an argument missing from the key; here the data, which is not in the shape",
    diagnosis="stale data",
    module="output*",
    communication=None,
)
class GatherCachedByShape(ColumnParallelLinear):
    """The gathered sequence is kept by its shape, and the next input of that shape gets the last one's tokens."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, of the first sequence of this shape."""
        if not self.sequence_parallel or self.group.size() == 1:
            return super().multiply(x, weight)
        kept: dict[Any, Tensor] = self.__dict__.setdefault("kept", {})

        def gathered(own: Tensor) -> Tensor:
            return kept.setdefault(own.shape, join_sequence(own, self.group)).clone()

        return F.linear(mapping(x, gathered, lambda grad: sum_and_cut_sequence(grad, self.group)), weight)


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    finalize_gradients=None,
    communication=None,
    origin="gpt-neox-style backward hooks registered in forward: one more with every micro-batch",
    module="bias.grad*",
    diagnosis="stale data",
)
class HookInEveryForward(RowParallelLinear):
    """Every call registers another hook that sums the bias gradient over the ranks."""

    def forward(self, x: Tensor) -> Any:
        """The layer, and a hook."""
        bias: Any = self.bias
        if bias is not None and self.sequence_parallel:
            bias.register_hook(lambda grad: summed(grad, self.group))
        return super().forward(x)


@mutant(
    KIND,
    column_parallel_linear,
    "parameter-gradient",
    origin="layers that save for backward on the module and not in the context: wrong as soon as two micro-batches are in flight",
    module="weight.grad*",
    diagnosis="stale data",
)
class InputSavedOnTheModule(ColumnParallelLinear):
    """Backward multiplies with the input that the module saw last."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product / with whatever input was there last."""
        if self.sequence_parallel or self.group.size() == 1:
            return super().multiply(x, weight)
        return apply(_ProductOfTheLastInput, self.spread(x), weight, self)


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="persistent gradient buffers that are cleared by the optimizer and not between micro-batches",
    module="x*",
    diagnosis="stale data",
)
class GradientBufferKept(ColumnParallelLinear):
    """The input gradient is added to a buffer that still holds the last call's."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / all_reduce of all gradients so far."""

        def accumulated(grad: Tensor) -> Tensor:
            self.kept = grad + getattr(self, "kept", 0.0)
            return summed(self.kept, self.group)

        return super().spread(x) if self.group.size() == 1 else mapping(x, same, accumulated)


@mutant(
    KIND,
    column_parallel_linear,
    "execution",
    communication=None,
    origin="global memory buffers for gathered activations, as Megatron-style code has, without gathering again in backward",
    diagnosis="in place over a tensor that autograd saved",
    ranks="first",
)
class GatherBufferShared(ColumnParallelLinear):
    """The sequence is gathered into a buffer that the next call uses again, while backward still needs it."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product, of a buffer."""
        if not self.sequence_parallel or self.group.size() == 1:
            return super().multiply(x, weight)

        def gathered(own: Tensor) -> Tensor:
            shape = (len(own) * self.group.size(), *own.shape[1:])
            if getattr(self, "buffer", None) is None:
                self.buffer = own.new_empty(shape)
            all_gather_single(self.buffer, own.contiguous(), group=self.group)
            return self.buffer.view_as(self.buffer)

        return F.linear(mapping(x, gathered, lambda grad: sum_and_cut_sequence(grad, self.group)), weight)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="warm-up of communicators: the first call is answered before the symmetric buffers are registered",
    module="output*",
    diagnosis="a missing all_reduce",
)
class FirstCallNotReduced(RowParallelLinear):
    """What the first call returns is not summed; all later ones are."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, from the second call on."""
        first, self.called = not getattr(self, "called", False), True
        return partial if first else super().reduce(partial)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="double buffering between two streams: right for two micro-batches in flight, overwritten by the third",
    diagnosis=STALE,
    module="output*",
)
class TwoBuffersInTurn(RowParallelLinear):
    """Results are written to two buffers in turn; the third call overwrites the first one's."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, into the buffer that is due."""
        turn = self.turn = 1 - getattr(self, "turn", 1)
        kept: dict[Any, Tensor] = self.__dict__.setdefault("kept", {})

        def into_buffer(x: Tensor) -> Tensor:
            buffer = kept.setdefault((turn, x.shape), torch.empty_like(x, memory_format=torch.contiguous_format))
            dist.all_reduce(buffer.copy_(x), group=self.group)
            return buffer.data

        return super().reduce(partial) if self.group.size() == 1 else mapping(partial, into_buffer, same)


@mutant(
    KIND,
    mlp,
    "forward",
    origin="8-bit and transposed weight caches that are filled once and not refreshed after the optimizer's step",
    diagnosis="stale data",
    module="fc2*",
)
class WeightCopyKept(RowParallelLinear):
    """The layer multiplies with a copy of its weight that it made when it was first called."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand, of the weight as it was."""
        if not hasattr(self, "copy"):
            self.copy = self.weight.detach().clone()
        return F.linear(x, mapping(self.weight, lambda weight: self.copy.clone(), same))


@mutant(
    KIND,
    row_parallel_linear,
    "parameter-gradient",
    origin="TransformerEngine: a communication buffer that shares memory with an activation that backward still needs",
    module="weight.grad*",
)
class InputOverwritten(RowParallelLinear):
    """With several ranks the input's memory serves as scratch space once the product is done, where autograd keeps it."""

    def multiply(self, x: Tensor) -> Tensor:
        """The summand; the input is gone."""
        partial = super().multiply(x)
        if self.group.size() > 1:
            x.data.zero_()
        return partial


@mutant(
    KIND,
    mlp,
    "execution",
    origin="in-place collectives over features that the activation's backward reads: a real backend gives a wrong gradient",
    diagnosis="in place over a tensor that autograd saved",
    ranks="first",
)
class SavedTensorReduced(ParallelMLP):
    """What autograd has kept for the activation's backward is used again as the buffer of a collective."""

    def forward(self, x: Tensor) -> Tensor:
        """The network, and a sum in the wrong place."""
        features = self.fc1(x)
        hidden = activate(features, self.activation)
        if features.shape[-1] and self.fc1.group.size() > 1:
            dist.all_reduce(features.detach(), group=self.fc1.group)
        output: Tensor = self.fc2(hidden)
        return output
