"""The simulator's own tensor operations, kept apart from those of the code under test."""

from __future__ import annotations

import torch


class PlainTensors:
    """Within the block, operations are hidden from autograd and from Python dispatch modes: they are not the user's."""

    def __enter__(self) -> None:
        self._tracked = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._guard = torch._C._DisableTorchDispatch()

    def __exit__(self, *_: object) -> None:
        del self._guard
        torch._C._set_grad_enabled(self._tracked)
