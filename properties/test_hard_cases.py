"""Correct code that once looked wrong: each case cancels, overflows or rounds more than most."""

from __future__ import annotations

import pytest

from tpverify.verification import check_case, read_case

CASES = [
    # Logits near 1000 carry an absolute error of 1e-13, which exp makes a relative one.
    "Case('vocab_parallel_cross_entropy', VocabParallelCrossEntropyConfig(z_loss=0.01), world_size=1, seed=143, values='spike')",
    # The table that the first call looks up is another one than at the end.
    "Case('vocab_parallel_embedding', VocabParallelEmbeddingConfig(vocab=2), world_size=2, seed=1, values='integers', calls='twice')",
]


@pytest.mark.parametrize("text", CASES)
def test_no_wolf(text: str) -> None:
    assert check_case(*read_case(text)) == []
