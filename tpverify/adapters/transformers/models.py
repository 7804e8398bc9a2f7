"""How a family's tiny model comes to be: saved once, then loaded as users load it, whole or under a tensor-parallel plan."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from tpverify.adapters.transformers.config import DecoderConfig, Family


@contextlib.contextmanager
def around_ranks(family: Family, config: DecoderConfig) -> Iterator[None]:
    """The checkpoint is there before the ranks load it."""
    with quietly():
        _checkpoint(family, config)
        yield


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Loads in the rank's own thread, without progress bars and advice."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
            yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


SEED = 0
"""Of a checkpoint's numbers, which a script has to draw again."""


class Checkpoint:
    """A randomly initialised model in a folder that goes away with this object."""

    def __init__(self, family: Family, config: DecoderConfig) -> None:
        self.folder = tempfile.mkdtemp(prefix="tpverify-")
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **pretrained_fields(family, config)))
        model.save_pretrained(self.folder)


@lru_cache(maxsize=16)
def _checkpoint(family: Family, config: DecoderConfig) -> Checkpoint:
    return Checkpoint(family, config)


def pretrained_fields(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """Of the family's own config."""
    fields: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied,
        "pad_token_id": None if config.padding < 0 else config.padding,
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": 16,
    }
    return {**fields, **family.fields(config)}


def _load(family: Family, config: DecoderConfig, **distributed: Any) -> Any:
    folder, dtype = _checkpoint(family, config).folder, torch.get_default_dtype()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **implementations(config), **distributed)


def implementations(config: DecoderConfig) -> dict[str, str]:
    """Options of ``from_pretrained``: which kernels compute the model."""
    kernels = {"experts_implementation": config.kernel} if config.experts else {}
    return {"attn_implementation": config.attention, **kernels}


def reference(family: Family, config: DecoderConfig) -> nn.Module:
    """The model on one device."""
    with quietly():
        # Recomputation changes no number of its own, and would not see parameters that are swapped in for a forward only.
        mode = "train" if config.mode == "checkpointing" else config.mode
        return Decoder(_load(family, config), dataclasses.replace(config, mode=mode))


def parallel(family: Family, config: DecoderConfig) -> nn.Module:
    """The model under its plan; every rank loads its own part."""
    distributed = DistributedConfig(**distributed_options(config, dist.get_world_size()))
    return Decoder(_load(family, config, distributed_config=distributed), config)


def distributed_options(config: DecoderConfig, size: Any) -> dict[str, Any]:
    """Of a ``DistributedConfig`` on ``size`` ranks."""
    options: dict[str, Any] = {"tp_size": size}
    if config.embedding == "columns":
        options["tp_plan"] = {"model.embed_tokens": "embedding_colwise"}
    if config.expert_plan != "tensor":
        options |= {"ep_size": size, "ep_implementation": config.expert_plan}
    return options


class Decoder(nn.Module):
    """The model, called as the config says."""

    causal_lm: Any

    def __init__(self, model: Any, config: DecoderConfig) -> None:
        super().__init__()
        self.causal_lm = model
        self.config = config
        self.held = held(model, config.call)
        self.train(config.mode in ("train", "checkpointing"))
        if config.mode == "checkpointing":
            model.activation_checkpointing_enable()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Ids [b, s], or their embeddings [b, s, hidden], and labels [b, s] -> logits [b, s, vocab], loss []."""
        if self.config.mode == "no_grad":
            with torch.no_grad():
                return self._outputs(tokens, labels)
        return self._outputs(tokens, labels)

    def _outputs(self, tokens: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        if self.held:
            return self.held
        call, mask = self.config.call, self._mask(tokens)
        if call == "cached":
            return {"logits": self._in_two_steps(tokens, mask)}
        options: dict[str, Any] = {"attention_mask": mask, "labels": labels, "use_cache": False}
        if call == "items":
            options["num_items_in_batch"] = torch.tensor(3)
        elif call == "keep":
            options["logits_to_keep"] = 1
        elif call == "states":
            options["output_hidden_states"] = True
        elif call == "packed":
            options["position_ids"] = restarted(tokens)
        if self.config.router_loss:
            options["output_router_logits"] = True
        output = self.causal_lm(**{"inputs_embeds" if call == "embeds" else "input_ids": tokens}, **options)
        found = {"logits": output.logits, "loss": output.loss, "router_loss": getattr(output, "aux_loss", None)}
        states = output.hidden_states if call == "states" else ()
        found |= {f"state {index}": state for index, state in enumerate(states)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _in_two_steps(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        first = self.causal_lm(input_ids=tokens[:, :-1], attention_mask=None if mask is None else mask[:, :-1], use_cache=True)
        second = self.causal_lm(input_ids=tokens[:, -1:], attention_mask=mask, cache=first.cache, use_cache=True)
        return torch.cat([first.logits, second.logits], dim=1)

    def _mask(self, tokens: Tensor) -> Tensor | None:
        if self.config.mask == "none":
            return None
        mask = torch.ones(tokens.shape[:2], dtype=torch.long)
        mask[0, 0 if self.config.mask == "left" else -1] = 0
        return mask


def held(model: Any, call: str) -> dict[str, Tensor]:
    """The whole parameters, by name, as they have been loaded, or as they are once they have been saved and loaded again."""
    if call == "saved" and dist.is_initialized():
        folder = [tempfile.mkdtemp(prefix="tpverify-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder, src=0)
        model.save_pretrained(folder[0])
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.get_default_dtype())
        dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)
    elif call not in ("loaded", "saved"):
        return {}
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """A DTensor, gathered."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def restarted(tokens: Tensor) -> Tensor:
    """Positions [b, s] of two sequences that lie in one row."""
    seq = tokens.shape[1]
    first = (seq + 1) // 2
    row = torch.cat([torch.arange(first), torch.arange(seq - first)])
    return row.expand(tokens.shape[0], seq)
