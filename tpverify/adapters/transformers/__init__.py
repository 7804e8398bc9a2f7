"""transformers' decoders under their own tensor- and expert-parallel plans (``from_pretrained`` with a ``DistributedConfig``)."""

from __future__ import annotations

from functools import partial

import torch

from tpverify.adapters.transformers.config import STORED, WITHOUT_LABELS, DecoderConfig, Family, decoder_configs
from tpverify.adapters.transformers.families import FAMILIES
from tpverify.adapters.transformers.models import around_ranks, parallel, reference
from tpverify.adapters.transformers.script import source
from tpverify.sharding import PlacementLike, Replicate, Shard
from tpverify.subjects.subject import Input, Subject, Vocabulary

EMBEDDING = "causal_lm.model.embed_tokens"


def _inputs(config: DecoderConfig) -> dict[str, Input]:
    shape = (config.batch, config.seq)
    embeds = config.call == "embeds"
    tokens = Input((*shape, config.hidden)) if embeds else Input(shape, kind="integers", high=config.vocab)
    if config.call in WITHOUT_LABELS:
        return {"tokens": tokens}
    # A mean over no label at all is NaN, and then nothing can be compared: labels are ignored where their number is given.
    ignored = -100 if config.call == "items" else None
    return {"tokens": tokens, "labels": Input(shape, kind="integers", high=config.vocab, ignore=ignored)}


def _placements(config: DecoderConfig) -> dict[str, PlacementLike]:
    return {f"{EMBEDDING}.weight": Shard(1 if config.embedding == "columns" else 0), "*": Replicate()}


def _vocabulary(config: DecoderConfig) -> Vocabulary:
    embeds, columns = config.call == "embeds", config.embedding == "columns"
    return Vocabulary(
        config.vocab,
        parameters=() if columns else (f"{EMBEDDING}.weight",),
        ids="" if embeds else "tokens",
        targets="labels" if "labels" in _inputs(config) else "",
    )


def _rejects(family: Family, config: DecoderConfig, world_size: int) -> bool:
    return family.whole_heads and config.call not in STORED and config.kv_heads % world_size != 0


def _subject(name: str, family: Family) -> Subject:
    return Subject(
        name=f"transformers.{name}",
        reference=partial(reference, family),
        parallel=partial(parallel, family),
        configs=decoder_configs(family),
        inputs=_inputs,
        placements=_placements,
        rejects=partial(_rejects, family),
        refusal=RuntimeError,
        vocabulary=_vocabulary,
        context=partial(around_ranks, family),
        precision=torch.float32,  # norms and the loss are computed in it
        dtypes=("float64", "float32"),
        script=partial(source, family),
    )


SUBJECTS = {name: _subject(name, family) for name, family in FAMILIES.items()}
