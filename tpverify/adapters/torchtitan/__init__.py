"""torchtitan's Llama 3 under its three SPMD backends, with and without sequence parallelism."""

from __future__ import annotations

from functools import partial

import torch

from tpverify.adapters.torchtitan.config import CALLS, IGNORED, STORED, LlamaConfig, llama_configs
from tpverify.adapters.torchtitan.environment import RANK_LOCAL, quietly
from tpverify.adapters.torchtitan.loss import cross_entropy
from tpverify.adapters.torchtitan.models import build, finalize_gradients
from tpverify.adapters.torchtitan.references import ReferenceLlama
from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.subject import Collective, Input, Subject, Vocabulary

WITHOUT_LABELS = ("logits", STORED)


def _inputs(config: LlamaConfig) -> dict[str, Input]:
    ids = Input((config.batch, config.seq), kind="integers", high=config.vocab)
    labels = Input((config.batch, config.seq), kind="integers", high=config.vocab, ignore=IGNORED)
    return {"ids": ids} if config.call in WITHOUT_LABELS else {"ids": ids, "labels": labels}


PLACEMENTS: dict[str, PlacementLike] = {
    "tok_embeddings.weight": Shard(0),
    "lm_head.weight": Shard(0),
    "*.w[13qkv]*.weight": Shard(0),
    "*.w[o2].weight": Shard(1),
    "*norm.weight": Replicate(),
}


def _communication(config: LlamaConfig, world_size: int) -> list[Collective] | None:
    """Around each part of a layer, after the embedding and before the last layer the activation changes its layout once."""
    if world_size == 1:
        return []
    if config.recompute or config.call not in ("logits", "loss"):
        return None
    count, tokens = 2 * config.layers + 1, config.batch * config.seq
    kinds = ("all_gather", "reduce_scatter") if config.sequence_parallel else ("all_reduce",)
    phases = ("forward",) if config.mode == "no_grad" else ("forward", "backward")
    messages = [Collective(kind, phase, "*", count, tokens * config.hidden) for kind in kinds for phase in phases]
    if config.call == "loss":
        messages.append(Collective("all_reduce", "forward", "*", 3, tokens))
    if config.sequence_parallel and config.mode != "no_grad":
        messages.append(Collective("all_reduce", "optimizer", "*", count, config.hidden))
    return messages


def _vocabulary(config: LlamaConfig) -> Vocabulary:
    return Vocabulary(
        config.vocab,
        parameters=("tok_embeddings.weight", "lm_head.weight"),
        ids="ids",
        targets="" if config.call in WITHOUT_LABELS else "labels",
        ignore=IGNORED,
    )


def _subject(name: str, backend: str, calls: tuple[str, ...]) -> Subject:
    return Subject(
        name=f"torchtitan.{name}",
        reference=ReferenceLlama,
        parallel=partial(build, backend),
        configs=partial(llama_configs, calls=calls),
        inputs=_inputs,
        placements=PLACEMENTS,
        outputs=lambda config: Shard(2) if config.call == "logits" else Replicate(),
        finalize_gradients=finalize_gradients,
        rejects=lambda config, world_size: config.kv_heads % world_size != 0,
        communication=_communication if backend == "spmd_types" else None,  # beside FSDP's, of one rank each
        vocabulary=_vocabulary,
        rank_local=RANK_LOCAL,
        precision=torch.float32,  # rotations and losses are computed in it
        dtypes=("float64", "float32"),
        context=quietly,
    )


SUBJECTS = {
    "cross_entropy": cross_entropy,
    "llama3": _subject("llama3", "spmd_types", CALLS),  # beside FSDP only are its parameters more than the rank's own tensors
    "llama3_partial_dtensor": _subject("llama3_partial_dtensor", "partial_dtensor", (*CALLS, STORED)),
    "llama3_full_dtensor": _subject("llama3_full_dtensor", "full_dtensor", (*CALLS, STORED)),
}
