"""What a program does before it builds DeepSpeed's layers, and how one is built: here, and in the script that shows a case."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed.comm
import torch
from deepspeed.module_inject import layers
from deepspeed.utils.logging import logger
from torch import nn

from tpverify.current_group import tp_group

BACKEND = importlib.import_module("deepspeed.comm.torch")
"""By name, since ``deepspeed.comm.torch`` is torch itself."""


@contextlib.contextmanager
def surroundings(config: Any) -> Iterator[None]:
    """Quiet, and without the kernel that sums in memory shared by real processes; ``tp_overlap_comm`` is a field of the class."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),  # torch's, of names that are about to go
            mock.patch.object(BACKEND, "build_shm_op", return_value=None),
            mock.patch.object(layers.TensorParallel_Layer, "tp_overlap_comm", getattr(config, "overlap", False)),
        ):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


COMMON: dict[str, Any] = {
    "rank_local": ("deepspeed.comm.comm", "deepspeed.module_inject.layers"),
    "context": surroundings,
    "subgroups": True,
}

PROGRAM = """
def build():
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.comm
    from deepspeed.module_inject import layers{imports}

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compile nothing
    deepspeed.comm.init_distributed()
    layers.set_autotp_mode(training={training})
    {statements}
    return module
"""


def begin(training: bool = True) -> Any:
    """What a program does first; returns the TP group."""
    deepspeed.comm.init_distributed()
    layers.set_autotp_mode(training=training)
    return tp_group()


def program(*statements: str, training: bool = True, imports: str = "") -> str:
    """Source of ``build()``.

    Args:
        statements: the last binds ``module``.
        imports: an import statement of their own.
    """
    lines = [line for statement in statements for line in statement.splitlines()]
    return PROGRAM.format(training=training, statements="\n    ".join(lines), imports=imports and f"\n    {imports}")


@dataclass(frozen=True)
class Layer:
    """A layer that takes the place of a module of torch's.

    Attributes:
        name: of its class.
        options: of its constructor, beside the module and the group.
        training: whether AutoTP is in training mode; else the layer is called without autograd.
        frozen: its weight needs no gradient.
        overlap: whether the reduction in backward is asynchronous.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    training: bool = True
    frozen: bool = False
    overlap: bool = False

    def built(self, module: nn.Module) -> nn.Module:
        """The layer, on this rank."""
        group = begin(self.training)
        return as_called(getattr(layers, self.name)(module, group, **self.options), self.training, self.frozen)

    def source(self, module: str) -> str:
        """Source of ``build()``.

        Args:
            module: an expression for torch's module.
        """
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        statements = ["layers.TensorParallel_Layer.tp_overlap_comm = True"] if self.overlap else []
        statements += [f"module = layers.{self.name}({module}, dist.group.WORLD{options})"]
        if self.frozen:
            statements += ["module.weight.requires_grad_(False)"]
        imports = "from deepspeed.module_inject.tp_shard import AutoTPMeta" if "AutoTPMeta(" in options else ""
        return program(*statements, *([] if self.training else WITHOUT_AUTOGRAD), training=self.training, imports=imports)


WITHOUT_AUTOGRAD = ("module.requires_grad_(False)", "module.forward = torch.no_grad()(module.forward)")
"""Source of what :func:`as_called` does."""


def as_called(module: nn.Module, training: bool, frozen: bool = False) -> nn.Module:
    """The same module, with a frozen weight, or called without autograd."""
    if not training:
        module.requires_grad_(False)
        module.forward = torch.no_grad()(module.forward)
    elif frozen:
        module.get_parameter("weight").requires_grad_(False)
    return module
