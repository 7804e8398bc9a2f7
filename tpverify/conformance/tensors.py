"""What a step's tensors hold and how they lie in memory: decided by the program alone, the same on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpverify.conformance.program import Program, Step

UNSIGNED = (torch.uint8, torch.uint16)
COTANGENT = 1000
"""Numbers of a step's cotangents are drawn as if by a step that far away."""


def numbers(program: Program, index: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What ``rank`` (global) contributes to step ``index``, on the default device."""
    generator = torch.Generator("cpu").manual_seed((program.seed * 2003 + index) * 101 + rank)
    inexact = dtype.is_floating_point or dtype.is_complex
    if inexact and program.values != "integers":
        drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.complex64 if dtype.is_complex else torch.float64)
        if program.values != "normal":
            drawn = drawn.abs()
        if program.values == "factors":
            drawn = drawn.clamp(min=1.0)
        drawn = drawn.to(dtype)
    else:
        low, high = (0, 2) if dtype == torch.bool else (0, 4) if dtype in UNSIGNED else (-3, 4)
        drawn = torch.randint(low, high, shape, generator=generator, device="cpu").to(dtype)
        if dtype.is_complex:
            drawn = drawn + 1j * torch.randint(low, high, shape, generator=generator, device="cpu")
    return drawn.to(torch.empty(0).device, dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in a fresh tensor of another memory layout.

    Args:
        layout: ``transposed`` (the last two dimensions), ``strided`` (every other element of the last) or ``expanded`` (the first row
            repeated); tensors with too few dimensions or elements stay contiguous.
    """
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and tensor.numel() > 1 and tensor.dim() > 0:
        wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    if layout == "expanded" and tensor.dim() > 0 and len(tensor):
        return tensor[:1].clone().expand(tensor.shape)
    return tensor.clone()


def small(tensor: Tensor) -> Tensor:
    """Change a result in place so that exact sums and products of it stay exact."""
    if tensor.is_complex():
        torch.view_as_real(tensor).fmod_(4)
    elif tensor.dtype != torch.bool:
        tensor.fmod_(4)
    return tensor


def fitted(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor's elements, repeated or cut to another shape; zeros if it has none."""
    count = math.prod(shape)
    flat = tensor.reshape(-1)
    if not flat.numel():
        return torch.zeros(shape, dtype=tensor.dtype)
    return flat.repeat(-(-count // flat.numel()))[:count].reshape(shape).clone()


def pair_rows(step: Step, size: int, source: int, destination: int) -> int:
    """Rows that one group rank sends another in an all_to_all with split sizes."""
    return step.splits[(source * size + destination) % len(step.splits)]
