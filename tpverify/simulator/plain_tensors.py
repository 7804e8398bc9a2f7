"""Tensors as they are: the simulator's own operations kept apart from those of the code under test, and promises waited for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


class PlainTensors:
    """Within the block, operations are hidden from autograd and from Python dispatch modes: they are not the user's."""

    def __enter__(self) -> None:
        self._tracked = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._guard = torch._C._DisableTorchDispatch()

    def __exit__(self, *_: object) -> None:
        del self._guard
        torch._C._set_grad_enabled(self._tracked)


def waited(tensor: Tensor) -> Tensor:
    """The tensor itself, where a functional collective has returned a promise of it."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor  # type: ignore[no-untyped-call]
