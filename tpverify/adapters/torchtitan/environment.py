"""What a program does before it builds torchtitan's models, and what their parts are from outside."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from spmd_types import _state as mesh_stack
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.distributed import spmd_types as spmd_state
from torchtitan.distributed.full_dtensor import parallelize_inputs

LOGGERS = ("", "torch.distributed.tensor._redistribute")
"""Of torchtitan, which logs every mesh and module to the root, and of advice that none here can follow."""

RANK_LOCAL = ("torchtitan.distributed.utils", "torchtitan.distributed.parallel_dims", "torchtitan.distributed.spmd_types")


@contextlib.contextmanager
def quietly(config: Any) -> Iterator[None]:
    """Errors only, and no warnings of names that are about to go."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Environment:
    """A rank's degrees of parallelism: the world is the TP group.

    Args:
        backend: ``spmd_backend``.
    """

    def __init__(self, backend: str, sequence_parallel: bool) -> None:
        size = dist.get_world_size()
        parallel_dims.device_type = torch.get_default_device().type
        utils.set_spmd_backend(backend)
        self.backend = backend
        self.parallelism = ParallelismConfig(tensor_parallel_degree=size, enable_sequence_parallel=sequence_parallel, spmd_backend=backend)
        self.dims = ParallelDims.from_config(self.parallelism, size)
        self.dims.build_mesh()
        if backend == "spmd_types":
            self._enter()

    def _enter(self) -> None:
        """What ``get_spmd_context`` does, but until the rank ends: backward, where layers are recomputed, is within it too."""
        mesh = self.dims.spmd_dense_mesh()
        spmd_state.set_spmd_meshes(dense_mesh=mesh, sparse_mesh=None)
        spmd_state._spmd_mesh_stack()[:] = [mesh]
        mesh_stack._clear_mesh_stack()
        mesh_stack._push_mesh(mesh)

    @property
    def mesh(self) -> Any:
        """The mesh of activations, the TP axis being the last one if there is more than one rank; None where they are plain tensors."""
        if self.backend == "full_dtensor":
            return self.dims.get_activated_mesh(["dp_replicate", "dp_shard", "cp", "tp"])
        return self.dims.get_mesh("tp") if self.backend == "partial_dtensor" and self.dims.tp_enabled else None

    def given(self, inputs: Tensor, labels: Tensor, **others: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Inputs as the trainer hands them over."""
        if self.backend == "full_dtensor":
            found: tuple[Tensor, Tensor, dict[str, Any]] = parallelize_inputs(self.dims, inputs, labels, others)
            return found
        return inputs, labels, others


def local(tensor: Tensor) -> Tensor:
    """The rank's own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of all parts together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
