"""What may happen to a buffer between an asynchronous call and its wait: poisoned before, watched meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpverify.simulator.exchange import Call
from tpverify.simulator.plain_tensors import PlainTensors

IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Kinds whose inputs are their outputs."""


def poison_outputs(call: Call, inputs: Sequence[Tensor]) -> None:
    """Poison what will be written, except where it shares memory with an input that must stay readable."""
    storages = set() if call.kind in IN_PLACE else {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    for output in call.outputs:
        if output.numel() and output.untyped_storage().data_ptr() not in storages:
            _poison(output)


class Watch:
    """Notices writes to the tensors of a call in flight.

    Version counters are cheap but shared by all views of a buffer, so where one has moved that is not the tensor's alone, the
    contents decide. They cannot where what is written depends on what was there: NaN stays NaN.

    Args:
        call: as issued, its outputs poisoned.
        copies: of the call's inputs.
    """

    def __init__(self, call: Call, copies: Sequence[Tensor]) -> None:
        read = [] if call.kind in IN_PLACE and call.outputs else list(zip(call.inputs, copies, strict=True))
        watched = [*read, *((output, output.clone()) for output in call.outputs)]
        self._watched = [(tensor, _version(tensor), before) for tensor, before in watched]

    def touched(self) -> bool:
        """Whether any of the tensors has another content than at the call."""
        with PlainTensors():
            moved = [(tensor, before) for tensor, version, before in self._watched if version is None or version != _version(tensor)]
            return any((_is_whole(tensor) and not tensor.is_inference()) or not _same(tensor, before) for tensor, before in moved)


def _is_whole(tensor: Tensor) -> bool:
    """Whether the tensor is all there is in its memory."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same(tensor: Tensor, before: Tensor) -> bool:
    if torch.equal(tensor, before):
        return True
    return tensor.shape == before.shape and bool(((tensor == before) | (tensor.isnan() & before.isnan())).all())


def _poison(tensor: Tensor) -> None:
    """Fill with a value that shows when it is used: NaN, the lowest integer, or the opposite of a boolean."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype != torch.uint8 else 255)
