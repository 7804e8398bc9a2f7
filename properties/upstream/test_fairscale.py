"""fairscale 0.4.13: what is wrong in its tensor-parallel layers, and that the rest is right."""

from __future__ import annotations

from typing import Any

import pytest
from released import CASES, assert_found, assert_holds, subjects_of

SUBJECTS = subjects_of("fairscale")

FINDINGS = {
    "a strided gradient is all-reduced": (
        "Case('fairscale.column_parallel_linear', LinearConfig(seq=2, in_features=2, out_features=2, bias=False), "
        "world_size=2, layout='transposed')",
        "buffers",
        "non-contiguous tensor at a collective",
    ),
    "an expanded gradient is all-reduced": (
        "Case('fairscale.mappings', RegionConfig(seq=2), world_size=2, layout='expanded')",
        "execution",
        "more than one element of the written-to tensor",
    ),
    "padding_idx is taken within the shard": (
        "Case('fairscale.vocab_parallel_embedding', EmbeddingConfig(vocab=2, padding_idx=1), world_size=2)",
        "execution",
        "Padding_idx must be within num_embeddings",
    ),
    "ids of other ranks count in scale_grad_by_freq": (
        "Case('fairscale.vocab_parallel_embedding', EmbeddingConfig(seq=2, vocab=2, scale_grad_by_freq=True), world_size=2)",
        "parameter-gradient",
        "weight.grad",
    ),
    "the norm's order is scale_grad_by_freq": (
        "Case('fairscale.parallel_embedding', EmbeddingConfig(max_norm=0.5), world_size=1)",
        "forward",
        "output",
    ),
    "the loss overwrites the logits": (
        "Case('fairscale.vocab_parallel_cross_entropy', CrossEntropyConfig(reuse=True), world_size=1)",
        "forward",
        "output[1]",
    ),
    "the loss needs contiguous logits": (
        "Case('fairscale.vocab_parallel_cross_entropy', CrossEntropyConfig(seq=2, batch=2), world_size=1, layout='transposed')",
        "execution",
        "view size is not compatible",
    ),
}

RIGHT: dict[str, dict[str, Any]] = {
    "vocab_parallel_embedding": {"padding_idx": None, "scale_grad_by_freq": False, "max_norm": None},
    "parallel_embedding": {"max_norm": None},
    "vocab_parallel_cross_entropy": {"reuse": False},
}
"""By subject, what keeps it off the wrong paths."""


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_is_wrong_is_found(finding: str) -> None:
    assert_found(*FINDINGS[finding])


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_rest_holds(name: str) -> None:
    assert assert_holds(SUBJECTS[name], lambda config: RIGHT.get(name, {}), layouts=False) >= CASES
