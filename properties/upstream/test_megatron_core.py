"""megatron-core: what is wrong in its tensor-parallel layers, loss and mappings, and that the rest is right."""

from __future__ import annotations

from typing import Any

import pytest
from released import CASES, assert_found, assert_holds, found_on, subjects_of

from tpverify.adapters.library import LIBRARIES

SUBJECTS = subjects_of("megatron_core")
VERSION = LIBRARIES["megatron_core"].version

FINDINGS = {
    "the loss overwrites the logits": (
        "Case('megatron_core.vocab_parallel_cross_entropy', CrossEntropyConfig(reuse=True), world_size=1)",
        "forward",
        "output[1]",
    ),
    "each rank smooths over its own shard": (
        "Case('megatron_core.vocab_parallel_cross_entropy', CrossEntropyConfig(vocab=4, label_smoothing=0.1), world_size=2)",
        "replication",
        "output",
    ),
    "a frozen weight takes the bias's gradient": (
        "Case('megatron_core.column_parallel_linear', ColumnConfig(frozen=True), world_size=1)",
        "parameter-gradient",
        "Expected bias.grad to be there",
    ),
    "a strided input is gathered": (
        "Case('megatron_core.column_parallel_linear', ColumnConfig(seq=2, in_features=2, out_features=2, bias=False, "
        "sequence_parallel=True), world_size=2, layout='sliced')",
        "buffers",
        "non-contiguous tensor at a collective",
    ),
}

COPY_REDUCED = "Case('megatron_core.mappings', RegionConfig(hidden=2), world_size=2, layout='sliced')"
"""A copy of a strided gradient is reduced, and the gradient itself returned; 0.19.2 no longer does."""

RIGHT: dict[str, dict[str, Any]] = {
    "column_parallel_linear": {"frozen": False},
    "vocab_parallel_cross_entropy": {"reuse": False, "label_smoothing": 0.0},
}
"""By subject, what keeps it off the wrong paths."""


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_is_wrong_is_found(finding: str) -> None:
    assert_found(*FINDINGS[finding])


def test_a_strided_gradient_is_reduced_since_a_later_version() -> None:
    if VERSION == "0.16.1":
        assert_found(COPY_REDUCED, "input-gradient", "x.grad")
    else:
        assert found_on(COPY_REDUCED) == set()


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_rest_holds(name: str) -> None:
    assert assert_holds(SUBJECTS[name], lambda config: RIGHT.get(name, {}), layouts=False) >= CASES
