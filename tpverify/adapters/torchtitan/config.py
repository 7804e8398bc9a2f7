"""Which tiny Llama 3 decoders are drawn: sizes that need not divide, and every option that changes the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tpverify.subjects.drawing import activations, divisible

CALLS = ("logits", "loss", "chunked", "logprobs")
STORED = "checkpoint"
MODES = ("train", "eval", "no_grad")
POSITIONS = ("none", "shared", "packed")
RECOMPUTED = ("", "full", "selective")
IGNORED = -100
TOKENS = 3
"""By how many tokens a loss is divided where it is: a number that the trainer sums over a step's batches."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes, elements, and options of a decoder over ids [batch, seq].

    Attributes:
        width: features per attention head; even.
        extra: features of an activation beyond those of all heads; less than ``heads``.
        sequence_parallel: ``enable_sequence_parallel``.
        fused: one projection makes queries, keys and values.
        tied: ``enable_weight_tying``.
        scaled_rotary: rotary frequencies are scaled as Llama 3.1's.
        positions: ids of positions given to the model: ``none``, ``shared`` [1, seq], or ``packed`` [batch, seq]: in each row
            two sequences, of other lengths.
        call: what is asked for. ``logits``: of the model; ``loss``: its cross-entropy; ``chunked``: the same by
            ``ChunkedLossWrapper``; ``logprobs``: the labels' log-probabilities and the entropies; ``checkpoint``: no call, the
            tensors that a checkpoint holds, and the parameters that twice those tensors become.
        chunks: into how many the sequence is cut; of ``chunked`` only.
        divided: losses are divided by a number of tokens.
        scaled: backward starts from some number, as after the caller has scaled the loss; otherwise from 1. Of ``chunked`` only.
        mode: ``train``, ``eval``, or ``no_grad``: ``eval`` without autograd.
        recompute: activation checkpointing: none (""), ``full`` or ``selective``.
        meta: the model is built on the meta device, as the trainer does it, and gets memory once it is in parts.
    """

    batch: int = 1
    seq: int = 1
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    width: int = 2
    extra: int = 0
    ffn: int = 1
    vocab: int = 2
    sequence_parallel: bool = False
    fused: bool = False
    tied: bool = False
    scaled_rotary: bool = False
    positions: str = "none"
    call: str = "logits"
    chunks: int = 1
    divided: bool = False
    scaled: bool = False
    mode: str = "train"
    recompute: str = ""
    meta: bool = False

    @property
    def hidden(self) -> int:
        """Features of an activation."""
        return self.heads * self.width + self.extra


def cut_sizes(world_size: int, least: int) -> st.SearchStrategy[int]:
    """Up to 4 per rank; rarely one of which ``torch.chunk`` leaves a rank nothing."""
    sizes = range(least, max(least, 4 * world_size) + 1)
    filled = [size for size in sizes if -(-size // world_size) * (world_size - 1) < size]
    return st.sampled_from(filled * 8 + [size for size in sizes if size not in filled])


@st.composite
def llama_configs(draw: st.DrawFn, world_size: int, calls: tuple[str, ...] = CALLS) -> LlamaConfig:
    """All options; heads that do not divide are rare, to be refused; the sequence divides where the trainer asks for it."""
    sequence_parallel = draw(st.booleans())
    seq, batch, flaw = draw(activations(world_size, sequence_parallel, ("heads", "kv_heads")))
    kv_heads = draw(divisible(world_size, flaw != "", largest=2))
    heads = kv_heads * draw(st.integers(1, 2))
    if flaw == "kv_heads":
        heads = kv_heads * world_size
    call = draw(st.sampled_from(calls))
    drawn: dict[str, Any] = {
        "positions": draw(st.sampled_from(POSITIONS)),
        "mode": draw(st.sampled_from(MODES)),
        "recompute": draw(st.sampled_from(RECOMPUTED)),
        "meta": draw(st.booleans()),
    }
    if call in ("loss", "chunked"):
        drawn["divided"] = draw(st.booleans())
    if call == "chunked":
        drawn["chunks"] = draw(st.sampled_from([chunks for chunks in range(1, seq + 1) if seq % chunks == 0]))
        drawn["scaled"] = draw(st.booleans())
    return LlamaConfig(
        batch=batch,
        seq=seq,
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        width=draw(st.sampled_from([2, 4])),
        extra=draw(st.integers(0, min(2, heads - 1))),
        ffn=draw(cut_sizes(world_size, 1)),
        vocab=draw(cut_sizes(world_size, 2)),
        sequence_parallel=sequence_parallel,
        fused=draw(st.booleans()),
        tied=draw(st.booleans()),
        scaled_rotary=draw(st.booleans()),
        call=call,
        **drawn,
    )
