"""Where the tensors of rank processes may be: which device a backend takes, and how many ranks a machine has room for."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tpverify.errors import CaseError, NoDevice
from tpverify.options import CUDA, DEVICES

AVAILABLE = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
MOST_RANKS = 64
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's environment variable that lets ranks share a GPU."""
SHARED_GPUS_SINCE = (2, 30)


def device_for(backend: str, device: str | None) -> str:
    """The kind of device on which a backend's ranks run: the one asked for, or the backend's own.

    Raises:
        CaseError: this system, this torch or the backend cannot do that.
    """
    if not hasattr(os, "fork") or not dist.is_available() or not AVAILABLE[backend]():
        raise CaseError(f"Expected a system with fork and a torch with {backend} but got {sys.platform} and torch {torch.__version__}")
    allowed = DEVICES if backend == "gloo" else (CUDA,)
    if device is not None and device not in allowed:
        raise CaseError(f"Expected {' or '.join(allowed)} for world={backend!r} but got device={device!r}")
    return device or allowed[0]


def local_ranks(backend: str, device: str) -> int:
    """How many ranks this machine has room for.

    Raises:
        NoDevice: it has no GPU.
        CaseError: its NCCL cannot do what is asked.
    """
    gpus = torch.cuda.device_count() if device == CUDA else 0
    if device == CUDA and not gpus:
        raise NoDevice("Expected a GPU for device='cuda' but this machine shows none to torch")
    return gpus if backend == "nccl" and not gpus_are_shared() else MOST_RANKS


def gpus_are_shared() -> bool:
    """Whether NCCL has been told that ranks share GPUs.

    Raises:
        CaseError: this NCCL is too old for that.
    """
    if os.environ.get(SHARED_GPUS) != "1":
        return False
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < SHARED_GPUS_SINCE:
        raise CaseError(f"Expected NCCL 2.30 or newer for {SHARED_GPUS}=1 but got {'.'.join(map(str, version))}")
    return True


def check_gpus(ranks: int, gpus: int, host: str = "this machine") -> None:
    """NCCL takes one GPU for each rank.

    Raises:
        CaseError: there are fewer.
    """
    if ranks > gpus:
        raise CaseError(
            f"Expected one GPU for each rank but got {ranks} rank{'s' * (ranks != 1)} and {gpus} GPU{'s' * (gpus != 1)} on {host}; "
            f"with NCCL 2.30 or newer, {SHARED_GPUS}=1 lets ranks share them"
        )
