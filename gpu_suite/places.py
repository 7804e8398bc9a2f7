"""Where cases can run on this machine: worlds, their device and sizes, and what is missing where one cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpverify.processes.devices import SHARED_GPUS_SINCE

SIMULATED_SIZES = (1, 2, 3, 4)
GLOO_SIZES = (1, 2, 3)
NCCL_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Place:
    """A world and a device.

    Attributes:
        world, device: as for :func:`tpverify.verify`.
        sizes: world sizes that can be run.
        missing: why they cannot, or "".
    """

    world: str
    device: str
    sizes: tuple[int, ...]
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.world}-{self.device}"

    @property
    def several(self) -> tuple[int, ...]:
        """World sizes of more than one rank."""
        return tuple(size for size in self.sizes if size > 1)

    @property
    def largest_sizes(self) -> tuple[int, ...]:
        """World sizes of more than one rank, or of one where there are no others."""
        return self.several or self.sizes

    @property
    def most_ranks(self) -> int | None:
        """How many ranks a world may have; None = any number."""
        return max(self.sizes) if self.world == "nccl" else None


def places(device: str) -> list[Place]:
    """All places, those that cannot be run included.

    Args:
        device: ``cuda``, or ``cpu`` where the device is forced to the CPU.
    """
    if device == "cpu":
        return [
            Place("simulator", "cpu", SIMULATED_SIZES),
            Place("gloo", "cpu", GLOO_SIZES, _gloo()),
            Place("nccl", "cuda", NCCL_SIZES, "the device is forced to the CPU"),
        ]
    none = no_gpu()
    return [
        Place("simulator", "cuda", SIMULATED_SIZES, none),
        Place("gloo", "cuda", GLOO_SIZES, none or _gloo()),
        *([Place("nccl", "cuda", NCCL_SIZES, none or "this torch has no NCCL")] if none or not dist.is_nccl_available() else _nccl()),
    ]


def no_gpu() -> str:
    """Why there is no GPU, or ""."""
    if torch.cuda.is_available():
        return ""
    return f"no CUDA device found by torch {torch.__version__}; --gpu-device cpu runs what it can without one"


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that torch was built with."""
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return tuple(version) if isinstance(version, tuple) else (version // 1000, version // 100 % 10)


def may_share_a_gpu() -> bool:
    """Whether NCCL can put several ranks on one GPU."""
    return dist.is_nccl_available() and torch.cuda.is_available() and nccl_version() >= SHARED_GPUS_SINCE


def _gloo() -> str:
    return "" if dist.is_gloo_available() else "this torch has no gloo"


def _nccl() -> list[Place]:
    gpus = torch.cuda.device_count()
    if gpus >= 4:
        return [Place("nccl", "cuda", tuple(size for size in NCCL_SIZES if size <= gpus))]
    own = tuple(size for size in (1, 2) if size <= gpus)
    if may_share_a_gpu():
        return [Place("nccl", "cuda", (1, 2, 4))]
    version = ".".join(map(str, nccl_version()))
    needed = ".".join(map(str, SHARED_GPUS_SINCE))
    why = f"{gpus} GPU{'s' * (gpus > 1)}, and NCCL {version} puts one rank on each ({needed} and later put several)"
    return [Place("nccl", "cuda", own), Place("nccl", "cuda", tuple(size for size in (2, 4) if size > gpus), why)]
