"""How parameters start, and which gradients are still partial after backward under sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpverify.subjects.mappings import Group

INIT_STD = 0.02


def residual_init_std(layers: int) -> float:
    """Standard deviation of layers that write into the residual of a model of ``layers`` blocks: each block writes twice."""
    return INIT_STD / float((2 * layers) ** 0.5)


def initial_weight(out_features: int, in_features: int, std: float, dim: int, parts: Sequence[range]) -> nn.Parameter:
    """This rank's parts of a normally distributed [out_features, in_features] weight.

    Every rank draws the whole weight, so ranks with equal seeds cut one and the same model, whatever the TP degree.

    Args:
        dim: dimension that is cut.
        parts: logical indices along ``dim`` that this rank holds, in local order.
    """
    whole = torch.empty(out_features, in_features).normal_(0.0, std)
    return nn.Parameter(torch.cat([whole.narrow(dim, part.start, len(part)) for part in parts], dim))


def mark_sequence_parallel(parameter: Tensor, group: Group) -> None:
    """Flag a replicated parameter that is used on a part of the sequence: its gradient is partial after backward."""
    parameter.sequence_parallel_group = group  # type: ignore[attr-defined]


def finalize_gradients(module: nn.Module) -> None:
    """After backward: sum the partial gradients of all flagged parameters in one all_reduce.

    Raises:
        RuntimeError: a flagged parameter has no gradient; skipping it on one rank would let the others wait.
    """
    flagged = [parameter for parameter in module.parameters() if hasattr(parameter, "sequence_parallel_group")]
    group: Group | None = getattr(flagged[0], "sequence_parallel_group", None) if flagged else None
    if group is None or group.size() == 1:
        return
    gradients = [parameter.grad for parameter in flagged if parameter.grad is not None]
    if len(gradients) < len(flagged):
        raise RuntimeError("Expected a gradient for every flagged parameter but got grad=None: call finalize_gradients after backward")
    message = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(message, group=group)
    offset = 0
    for gradient in gradients:
        gradient.copy_(message[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """``product + bias``, or ``product`` where there is no bias."""
    return product if bias is None else product + bias
