"""Arithmetic whose every result is off by a rounding, up or down at random: how much of a result is digits, and how much luck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ONE_IN = 12
"""Each way: the mean square of a result's error is a sixth of its last digit's, as it is where a computer rounds stochastically."""


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block operations round at random, forward and backward: one result in six is off by the last digit of its dtype.

    Monte Carlo arithmetic (D. S. Parker, *Monte Carlo Arithmetic*, UCLA CSD-970002, 1997): the spread of some such runs is the
    error that an algorithm makes of roundings, whatever it computes. One run may be exact by luck: where equal numbers are
    subtracted, say, which other code, as correct, comes to in another order and finds not quite equal.

    What an operation writes in place, or that lies in the memory of what it reads, is left alone.

    Args:
        seed: of the random choices.
        digits: how many last digits; 0 = none, which rounds as ever.
    """

    def __init__(self, seed: int, digits: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed
        self._digits = digits

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operation itself, then a rounding."""
        given = kwargs or {}
        results = func(*args, **given)
        if not any(argument.alias_info for argument in (*func._schema.arguments, *func._schema.returns)):
            read = {_memory(tensor) for tensor in tree_leaves((args, given)) if isinstance(tensor, Tensor)}
            for result in tree_leaves(results):
                if isinstance(result, Tensor) and result.is_floating_point() and _memory(result) not in read | {0}:
                    self._round(result)
        return results

    def _round(self, tensor: Tensor) -> None:
        chosen = torch.randint(ONE_IN, tensor.shape, generator=self._generator(tensor.device), device=tensor.device, dtype=torch.int8)
        up, down = (chosen.eq(value).to(tensor.dtype) for value in (0, 1))
        with torch.no_grad():
            tensor.mul_(up.sub_(down).mul_(self._digits * torch.finfo(tensor.dtype).eps).add_(1))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _memory(tensor: Tensor) -> int:
    """Where a tensor's numbers are; 0 if they are nowhere, as zeros that nobody has written down, or in several places."""
    try:
        return 0 if tensor._is_zerotensor() else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse
        return 0
