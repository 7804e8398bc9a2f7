"""Where a case runs, and with which defaults: on the CPU, or with all its ranks and its reference on one GPU, with its own kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tpverify.errors import CaseError, NoDevice
from tpverify.options import CPU, CUDA, DEVICES


def checked_device(device: str, world: str) -> str:
    """The device that a world runs on: NCCL knows GPUs only.

    Args:
        device: one of ``DEVICES``.
        world: what executes the ranks.

    Raises:
        CaseError: there is no such device.
        NoDevice: there is one, but not on this machine.
    """
    if device not in DEVICES:
        raise CaseError(f"Expected one of {', '.join(DEVICES)} but got device={device!r}")
    needed = CUDA if world == "nccl" else device
    if needed == CUDA and not torch.cuda.is_available():
        asked = f"world={world!r}" if device != CUDA else f"device={device!r}"
        way_out = "the simulator and gloo run on the CPU" if world == "nccl" else f"device={CPU!r} runs the same cases"
        raise NoDevice(f"Expected a GPU that torch can use but got none for {asked}: {way_out}")
    return needed


def on_device(device: str) -> AbstractContextManager[Any]:
    """Within the block, in this thread, new tensors and modules lie on the device."""
    return nullcontext() if device == CPU else torch.device(device)


def on_cpu() -> AbstractContextManager[Any]:
    """Within the block new tensors lie on the CPU, whatever surrounds it: values are drawn there, the same for every device."""
    return nullcontext() if torch.get_default_device().type == CPU else torch.device(CPU)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block new floating-point tensors are of ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def generators(device: str) -> tuple[torch.Generator, ...]:
    """The random generators that code on the device draws from: the CPU's, and the current GPU's."""
    if device == CPU:
        return (torch.default_generator,)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return (torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()])


def random_state(device: str) -> list[torch.Tensor]:
    """The state of these generators."""
    return [generator.get_state() for generator in generators(device)]


@contextlib.contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Within the block these generators start from ``seed``; their states are restored."""
    before = random_state(device)
    try:
        for generator in generators(device):
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators(device), before, strict=True):
            generator.set_state(state)
