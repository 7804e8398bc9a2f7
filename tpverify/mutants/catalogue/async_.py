"""Planted bugs: asynchronous collectives that are not waited for, read too early, or whose buffers are used meanwhile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpverify.mutants.mappings import all_gather_single, mapping, same
from tpverify.mutants.mutant import mutant
from tpverify.subjects.linear import ColumnParallelLinear, RowParallelLinear
from tpverify.subjects.linear_subjects import column_parallel_linear, row_parallel_linear
from tpverify.subjects.mappings import Group, sum_and_cut_sequence
from tpverify.subjects.mlp import mlp

KIND = "asynchronous"
STALE = "stale or never written"


def started(x: Tensor, group: Group) -> tuple[Tensor, Any]:
    """A copy that is being summed over the ranks, and the handle to wait for."""
    output = x.detach().clone(memory_format=torch.contiguous_format)
    return output, dist.all_reduce(output, group=group, async_op=True)


@mutant(
    KIND,
    row_parallel_linear,
    "buffers",
    origin="PyTorch: a redistributed tensor goes on although its collective has not finished; the handle is dropped",
    module="*",
    diagnosis="whose Work was never waited",
)
class NeverWaited(RowParallelLinear):
    """Starts the reduction and uses its buffer; nobody keeps the handle."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, started."""
        return mapping(partial, lambda x: started(x, self.group)[0], same)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="PyTorch: a cast of an asynchronous result slips through the wait that other operations trigger",
    diagnosis=STALE,
    module="output*",
)
class ReadBeforeTheWait(RowParallelLinear):
    """Copies the result out of the buffer, then waits for it."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, read too early."""

        def early(x: Tensor) -> Tensor:
            output, work = started(x, self.group)
            result = output.clone()
            work.wait()
            return result

        return super().reduce(partial) if self.group.size() == 1 else mapping(partial, early, same)


@mutant(
    KIND,
    column_parallel_linear,
    "input-gradient",
    origin="Megatron-style overlap of the input gradient's all-reduce with the weight gradient, without the wait at the end",
    diagnosis=STALE,
    module="x.grad*",
)
class OverlapNeverWaited(ColumnParallelLinear):
    """Backward starts the input gradient's reduction and returns the buffer while it is still under way."""

    def spread(self, x: Tensor) -> Tensor:
        """Identity / all_reduce, started."""
        return super().spread(x) if self.group.size() == 1 else mapping(x, same, lambda grad: started(grad, self.group)[0])


@mutant(
    KIND,
    row_parallel_linear,
    "buffers",
    communication=None,
    origin="TransformerEngine user buffers: two chunks share one communication buffer, and the second overwrites the first in flight",
    module="*",
    diagnosis="was written while its collective was in flight",
)
class ChunksShareABuffer(RowParallelLinear):
    """The result is reduced in two chunks through one buffer, which is filled again before the first chunk is through."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g in two pieces."""

        def in_chunks(x: Tensor) -> Tensor:
            half = -(-x.numel() // 2)
            buffer, handles = x.new_empty(half), []
            for chunk in torch.split(x.flatten(), half):
                buffer[: len(chunk)].copy_(chunk)
                handles.append(dist.all_reduce(buffer, group=self.group, async_op=True))
            for handle in handles:
                handle.wait()
            return torch.cat([buffer, buffer])[: x.numel()].view(x.shape)

        return mapping(partial, in_chunks, same)


@mutant(
    KIND,
    row_parallel_linear,
    "forward",
    origin="wrappers that keep the handle for later and wait when the gradient comes back: correct in time for nobody",
    diagnosis=STALE,
    module="output*",
)
class WaitedInBackward(RowParallelLinear):
    """Where no bias is to be added the reduction is waited for in backward only; whoever reads the output before reads too early."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, started / waited for."""
        handles: list[Any] = []

        def start(x: Tensor) -> Tensor:
            output, work = started(x, self.group)
            handles.append(work)
            return output

        def finish(grad: Tensor) -> Tensor:
            handles.pop().wait()
            return grad

        alone = self.group.size() == 1 or not (self.bias is None or self.skip_bias_add)
        return super().reduce(partial) if alone else mapping(partial, start, finish)


@mutant(
    KIND,
    mlp,
    "forward",
    origin="the same in the middle of a network, where the next layer reads what has not arrived",
    diagnosis=STALE,
    module="fc1*",
)
class GatherWaitedInBackward(ColumnParallelLinear):
    """The gather of the sequence is started in forward and waited for when its gradient is due."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """all_gather, started, then the product."""
        if not self.sequence_parallel or self.group.size() == 1:
            return super().multiply(x, weight)
        handles: list[Any] = []

        def start(own: Tensor) -> Tensor:
            output = own.new_empty(len(own) * self.group.size(), *own.shape[1:])
            handles.append(all_gather_single(output, own.contiguous(), group=self.group, async_op=True))
            return output

        def finish(grad: Tensor) -> Tensor:
            handles.pop().wait()
            return sum_and_cut_sequence(grad, self.group)

        return F.linear(mapping(x, start, finish), weight)


@mutant(
    KIND,
    row_parallel_linear,
    "buffers",
    communication=None,
    origin="bucketed reductions that rely on handles completing in order, which is so on one stream only",
    module="*",
    diagnosis="whose Work was never waited",
)
class OnlyTheLastHandleWaited(RowParallelLinear):
    """The result is reduced in two pieces, and only the second handle is waited for."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g in two pieces."""

        def in_pieces(x: Tensor) -> Tensor:
            pieces = [started(piece, self.group) for piece in x.flatten().tensor_split(2)]
            pieces[-1][1].wait()
            return torch.cat([piece for piece, _ in pieces]).view(x.shape)

        return mapping(partial, in_pieces, same)


@mutant(
    KIND,
    row_parallel_linear,
    "buffers",
    origin="fused bias epilogues launched right after the all-reduce, on another stream that does not wait for it",
    module="*",
    diagnosis="was written while its collective was in flight",
)
class BiasAddedInFlight(RowParallelLinear):
    """The bias is added in place to the buffer of a reduction that is under way."""

    def forward(self, x: Tensor) -> Any:
        """The layer; without sequence parallelism the bias comes too early."""
        plain = self.input_is_parallel and not self.sequence_parallel and not self.skip_bias_add and self.group.size() > 1
        if self.bias is None or not plain:
            return super().forward(x)
        bias = self.bias

        def in_flight(partial: Tensor) -> Tensor:
            output, work = started(partial, self.group)
            output.add_(bias.detach())
            work.wait()
            return output

        # Adding and taking away again leaves the bias its gradient.
        return mapping(self.multiply(x), in_flight, same) + (bias - bias.detach())


@mutant(
    KIND,
    row_parallel_linear,
    "communication",
    origin="overlap that a later change has undone: the handle is waited for before anything else happens",
    equivalent="numbers, messages and their order are those of the synchronous call; only time, which nobody measures, could be saved",
)
class WaitedAtOnce(RowParallelLinear):
    """The reduction is started and waited for in the same breath, so that nothing overlaps with it."""

    def reduce(self, partial: Tensor) -> Tensor:
        """g, started and finished."""

        def at_once(x: Tensor) -> Tensor:
            output, work = started(x, self.group)
            work.wait()
            return output

        return mapping(partial, at_once, same)
