"""Half precision: a tensor's errors held against those of the single-device run, see :mod:`tpverify.low_precision`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tpverify.checks.margin import note
from tpverify.low_precision import Spread, allowed_scale, error_norms, row_ratios, scale_of
from tpverify.run import Comparison, Placed
from tpverify.sharding import shard
from tpverify.tolerance import unit_roundoff


def oracle_of(comparison: Comparison, label: str) -> torch.Tensor | None:
    """The logical tensor of that label in float64, where half precision needs one."""
    run = comparison.reference.oracle
    if run is None:
        return None
    name = label.removesuffix(".grad")
    held = (run.outputs,) if name == label else (run.parameter_gradients, run.input_gradients)
    placed = next((tensors[name] for tensors in held if name in tensors), None)
    return None if placed is None else placed.local


class Errors:
    """One tensor beside its oracle.

    Args:
        label: how the tensor is called.
        single, oracle: the logical tensor in the working dtype and in float64.
        rms: of the case's largest gradient, where the tensor is one.
    """

    def __init__(self, comparison: Comparison, label: str, single: torch.Tensor, oracle: torch.Tensor, rms: float = 0.0) -> None:
        self._label, self._single, self._oracle = label, single, oracle
        self._size, self._dtype = comparison.case.world_size, comparison.dtype
        self._rounding = unit_roundoff(self._dtype) * rms
        size = float(torch.linalg.vector_norm(oracle.double())) / max(1, oracle.numel()) ** 0.5
        self._cancels = size < self._rounding
        self._spread = comparison.reference.spread.get(label)

    def of_rows(self, placed: Placed, rank: int) -> str:
        """Which rows' errors are larger than those of correct code; "" if none."""
        assert placed.local is not None
        if not placed.local.numel():
            return ""
        single, oracle = (shard(tensor, placed.layout, rank, self._size) for tensor in (self._single, self._oracle))
        spread = self._spread
        if spread is not None:
            errors, inside = (shard(tensor, placed.layout, rank, self._size) for tensor in (spread.error, spread.inside))
            spread = Spread(errors, inside, spread.scale)
        noise = self._rounding * math.sqrt(oracle.shape[-1] if oracle.dim() else 1) if self._cancels else 0.0
        ratios = row_ratios(placed.local, single, oracle, self._size, self._dtype, spread, noise).reshape(-1)
        worst = int(ratios.argmax())
        note(float(ratios[worst]))
        if ratios[worst] <= 1:
            return ""
        error, of_single = (float(error_norms(tensor, oracle).reshape(-1)[worst]) for tensor in (placed.local, single))
        size = float(torch.linalg.vector_norm(oracle.reshape(len(ratios), -1)[worst]))
        return (
            f"Expected {self._label} to be about as near to float64 as the reference is in {self._dtype}, "
            f"but {int((ratios > 1).sum())} of {len(ratios)} rows are not\n"
            f"Worst is row {worst}, of norm {size:.3g}: its error is {error:.2g}, the reference's {of_single:.2g} "
            f"({error / float(ratios[worst]):.2g} allowed)"
        )

    def of_scale(self, held: Mapping[int, Placed]) -> str:
        """Whether all parts together are the oracle times another factor than the single-device run is; "" if not."""
        parts = [(placed.local, placed.layout, rank) for rank, placed in held.items() if placed.local is not None]
        if not parts or not self._oracle.numel() or self._cancels:
            return ""
        joined = torch.cat([local.double().reshape(-1) for local, _, _ in parts])
        single, oracle = (
            torch.cat([shard(tensor, layout, rank, self._size).double().reshape(-1) for _, layout, rank in parts])
            for tensor in (self._single, self._oracle)
        )
        got, wanted = scale_of(joined, oracle), scale_of(single, oracle)
        allowed = allowed_scale(joined, single, oracle, self._oracle.numel(), self._size, self._dtype, self._spread)
        if not math.isfinite(wanted):
            return ""
        note(abs(got - wanted) / allowed)
        if abs(got - wanted) <= allowed:
            return ""
        return (
            f"Expected {self._label} to have the scale of the reference in {self._dtype}, {wanted:.5f} times that in float64, "
            f"but got {got:.5f} times ({allowed:.1e} apart allowed)"
        )
