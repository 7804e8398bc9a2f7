"""Arithmetic whose every result is off by a rounding, up or down at random: how much of a result is digits, and how much luck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block each operation's floating-point results are off by ``relative``, up or down, forward and backward.

    Monte Carlo arithmetic (D. S. Parker, *Monte Carlo Arithmetic*, UCLA CSD-970002, 1997): the spread of some such runs is the
    error that an algorithm makes of roundings, whatever it computes. One run may be exact by luck: where equal numbers are
    subtracted, say, which other code, as correct, comes to in another order and finds not quite equal.

    What an operation writes in place, or views of what was there, is left alone.

    Args:
        seed: of the random signs.
        relative: size of a rounding.
    """

    def __init__(self, seed: int, relative: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed
        self._relative = relative

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operation itself, then a rounding."""
        results = func(*args, **(kwargs or {}))
        if not any(argument.alias_info for argument in (*func._schema.arguments, *func._schema.returns)):
            for result in tree_leaves(results):
                if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
                    self._round(result)
        return results

    def _round(self, tensor: Tensor) -> None:
        signs = torch.randint(2, tensor.shape, generator=self._generator(tensor.device), device=tensor.device, dtype=torch.int8)
        with torch.no_grad():
            tensor.mul_(signs.to(tensor.dtype).mul_(2 * self._relative).add_(1 - self._relative))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
