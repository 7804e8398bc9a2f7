"""Which tiny decoders are drawn: sizes that need not divide, and every option that changes the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tpverify.subjects.drawing import divisible, uneven_sizes
from tpverify.subjects.dtensor_embedding import fitting_vocabularies

MODES = ("eval", "train", "checkpointing", "no_grad")
CALLS = ("loss", "logits", "items", "embeds", "keep", "cached", "states", "packed", "loaded", "saved")
STORED = ("loaded", "saved")
WITHOUT_LABELS = ("logits", "keep", "cached", *STORED)
MASKS = ("none", "left", "right")


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes, elements, and options of a decoder with its language model head, over tokens [batch, seq].

    Attributes:
        width: hidden features per attention head; the hidden size is ``heads * width``.
        window: tokens that sliding attention sees; 0 = no sliding attention.
        padding: ``pad_token_id``; -1 = none.
        attention: its implementation, ``eager`` or ``sdpa``.
        mode: ``eval``, ``train``, ``checkpointing``: ``train`` with recomputed layers; ``no_grad``: ``eval`` without autograd.
        call: what is asked of the model. ``loss``: logits, and the loss of labels; ``logits`` only; ``items``: the loss as a sum over
            a number of items; ``embeds``: embeddings are given instead of ids; ``keep``: the last token's logits; ``cached``:
            all tokens but the last, and then the last, with a cache; ``states``: all layers' hidden states too; ``packed``: positions of
            two sequences in one row; ``loaded``: no call, the parameters that ``from_pretrained`` has loaded; ``saved``: the same
            of a model that ``save_pretrained`` has written from those parts.
        mask: which end of the first row is padded.
        embedding: how the plan cuts the embedding: ``rows`` (ids, the default) or ``columns``.
        experts, active: how many there are and how many a token goes to; 0 = a dense model.
        expert_plan: ``tensor``: each rank holds a part of every expert; otherwise whole experts are dealt out, and this is how
            tokens reach them: ``auto``, ``all_to_all`` or ``all_reduce``.
        router_loss: whether the auxiliary loss of the router is added.
        kernel: how experts are computed: ``eager`` or ``batched_mm``.
    """

    batch: int = 1
    seq: int = 2
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 4
    width: int = 2
    ffn: int = 2
    vocab: int = 2
    tied: bool = False
    bias: bool = False
    window: int = 0
    padding: int = -1
    attention: str = "eager"
    mode: str = "eval"
    call: str = "loss"
    mask: str = "none"
    embedding: str = "rows"
    experts: int = 0
    active: int = 0
    expert_plan: str = "tensor"
    router_loss: bool = False
    kernel: str = "eager"

    @property
    def hidden(self) -> int:
        """Features of an activation."""
        return self.heads * self.width


@dataclass(frozen=True, eq=False)
class Family:
    """A model type, and what is drawn of it.

    Attributes:
        model_type: as ``AutoConfig.for_model`` takes it.
        fields: what its config is given, from a :class:`DecoderConfig`.
        draws: the options that exist for it beyond those that all have: ``bias``, ``window``.
        whole_heads: whether heads must divide: attention runs on each rank's own heads.
        fixed: fields of the :class:`DecoderConfig` that have one value only.
        grouped: whether there may be fewer key and value heads than heads.
        moe: whether there are experts.
        expert_plans: of the experts.
    """

    model_type: str
    fields: Any = None
    draws: tuple[str, ...] = ()
    whole_heads: bool = True
    fixed: Mapping[str, Any] | None = None
    grouped: bool = True
    moe: bool = False
    expert_plans: tuple[str, ...] = ("tensor", "auto", "all_to_all", "all_reduce")


def decoder_configs(family: Family) -> Any:
    """A strategy of a family's configs by world size."""

    @st.composite
    def configs(draw: st.DrawFn, world_size: int) -> DecoderConfig:
        flaw = world_size > 1 and family.whole_heads and draw(st.integers(0, 9)) == 9
        kv_heads = draw(divisible(world_size, flaw, largest=2)) if family.whole_heads else draw(st.integers(1, 3))
        heads = kv_heads * draw(st.integers(1, 3 if family.grouped else 1))
        vocab = draw(fitting_vocabularies(world_size, least=2))
        call = draw(st.sampled_from(CALLS))
        drawn: dict[str, Any] = {
            "batch": draw(st.integers(1, 2)),
            "seq": draw(st.integers(2, 5)),
            "layers": draw(st.integers(1, 2)),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": draw(st.sampled_from([4, 8])),
            "width": draw(st.sampled_from([2, 3, 4])),
            # At least 2: released DTensor refuses to reshape a sharded dimension of size 1.
            "ffn": max(2, draw(uneven_sizes(world_size))),
            "vocab": vocab,
            "tied": draw(st.booleans()),
            "bias": "bias" in family.draws and draw(st.booleans()),
            "window": draw(st.sampled_from([0, 1, 2])) if "window" in family.draws else 0,
            "padding": draw(st.sampled_from([-1, -1, 0, vocab - 1])),
            "attention": draw(st.sampled_from(["eager", "sdpa"])),
            # The library switches its cache off where layers are recomputed.
            "mode": draw(st.sampled_from([mode for mode in MODES if call != "cached" or mode != "checkpointing"])),
            "call": call,
            "mask": "none" if call == "packed" else draw(st.sampled_from(MASKS)),
            "embedding": draw(st.sampled_from(["rows", "rows", "columns"])),
        }
        if family.moe:
            plan = draw(st.sampled_from(family.expert_plans))
            # At least 2: a router that ranks groups of experts looks at two of each.
            some = max(2 // world_size, draw(st.integers(1, 2))) * world_size
            drawn["experts"] = some + draw(st.integers(0, 1)) if plan == "tensor" else some
            drawn["active"] = draw(st.integers(1, min(3, drawn["experts"])))
            drawn["expert_plan"] = plan
            drawn["router_loss"] = draw(st.booleans())
            drawn["kernel"] = draw(st.sampled_from(["eager", "batched_mm"]))
        return DecoderConfig(**{**drawn, **(family.fixed or {})})

    return configs
