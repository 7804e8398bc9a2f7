"""torchtitan 0.3.0: what is wrong in its Llama 3 and its loss under tensor parallelism, what only looks so, and that the rest is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from released import CASES, Recorder, assert_cases_hold, assert_found, counted, found_on, subjects_of

from tpverify.case import Case

SUBJECTS = subjects_of("torchtitan")

FINDINGS = {
    # On the meta device spmd_types' replicate_to_varying answers with the size of the largest part on every rank; the trainer builds
    # models there, so that ffn=3 becomes 4, with weights that one device does not have.
    "on the meta device every rank's part is as large as the first": (
        "Case('torchtitan.llama3', LlamaConfig(heads=2, kv_heads=2, ffn=3, meta=True), world_size=2)",
        "forward",
        "output",
    ),
    # The loss knows better.
    "so that the loss refuses a vocabulary that does not divide": (
        "Case('torchtitan.llama3', LlamaConfig(heads=2, kv_heads=2, ffn=2, vocab=3, call='loss', meta=True), world_size=2)",
        "execution",
        "expected local vocab size 1 for global vocab size 3, got 2",
    ),
    # compute_logprobs gathers parts as if they were of one size; cross_entropy_loss takes any.
    "parts of a vocabulary that does not divide cannot be gathered": (
        "Case('torchtitan.llama3', LlamaConfig(heads=2, kv_heads=2, ffn=2, vocab=3, call='logprobs'), world_size=2)",
        "communication",
        "issue the same collective",
    ),
    # _DecoderOutputGradientBackProp returns the gradient that it has made ready, whatever the loss's is; a comment says so.
    "a factor on the chunked loss is lost": (
        "Case('torchtitan.llama3', LlamaConfig(call='chunked', scaled=True), world_size=1, seed=2)",
        "parameter-gradient",
        "lm_head.weight.grad",
    ),
    # spmd_types takes the rank's chunk, of which there are fewer than ranks.
    "a rank without features cannot be built": (
        "Case('torchtitan.llama3', LlamaConfig(heads=2, kv_heads=2), world_size=2)",
        "execution",
        "raised IndexError",
    ),
    # Embedding.forward looks ids of other ranks up in the last row, which there need not be.
    "a rank without rows of the table raises": (
        "Case('torchtitan.llama3_partial_dtensor', LlamaConfig(heads=4, kv_heads=4, ffn=4, vocab=5), world_size=4)",
        "execution",
        "self indexing axis dim should be positive",
    ),
    # fully_shard packs gradients by a kernel that takes no empty one.
    "a rank without features has no backward": (
        "Case('torchtitan.llama3_partial_dtensor', LlamaConfig(heads=4, kv_heads=4, ffn=5, vocab=4), world_size=4)",
        "execution",
        "_chunk_cat expects non-empty tensor",
    ),
    # DTensor gathers such weights, so that the output is whole, and Module._redistribute_outputs expects parts.
    "fewer features than ranks are refused by a check of placements": (
        "Case('torchtitan.llama3_full_dtensor', LlamaConfig(heads=2, kv_heads=2), world_size=2)",
        "execution",
        "out_src_shardings expects",
    ),
    # The one rank refuses, and the others wait for its maximum.
    "the loss refuses a rank without vocabulary on that rank only": (
        "Case('torchtitan.cross_entropy', LossConfig(vocab=5), world_size=4)",
        "execution",
        "does not support empty vocab shards",
    ),
}

LOOKS_WRONG = {
    # Their type is R, not I: fully_shard, and here finalize_gradients, sums them.
    "each rank has its own gradient of a norm under sequence parallelism": (
        "Case('torchtitan.llama3', LlamaConfig(seq=4, heads=2, kv_heads=2, ffn=4, sequence_parallel=True), world_size=2, calls='twice')"
    ),
    # parallelize makes two parameters of one; init_weights, which the trainer calls after it, ties them again, also beside FSDP.
    "tied weights are untied": (
        "Case('torchtitan.llama3_partial_dtensor', LlamaConfig(seq=3, heads=2, kv_heads=2, ffn=2, tied=True, meta=True), world_size=2, "
        "calls='twice')"
    ),
    # Each chunk's is a summand, and so is what they are put into: they are summed once, where it enters the norm's graph.
    "the gradients of chunks are not summed over ranks": (
        "Case('torchtitan.llama3_full_dtensor', LlamaConfig(seq=4, heads=2, kv_heads=2, ffn=2, call='chunked', chunks=2), world_size=2)"
    ),
    # They are gathered as I: the gradient is the same on all ranks, and each takes its part.
    "nothing sums the gradient of gathered logits": (
        "Case('torchtitan.llama3', LlamaConfig(seq=3, heads=2, kv_heads=2, ffn=2, vocab=4, call='logprobs'), world_size=2)"
    ),
    # It is masked afterwards, in forward and in backward.
    "targets of other ranks and ignored ones are looked up at the first id": (
        "Case('torchtitan.cross_entropy', LossConfig(batch=3, seq=5, vocab=3, reduction='none'), world_size=2, values='one_shard')"
    ),
    # The rank's part holds whole groups of query, key and value heads; state_dict gathers it before it is taken apart.
    "a fused weight is cut along its rows": (
        "Case('torchtitan.llama3_full_dtensor', LlamaConfig(heads=4, kv_heads=2, ffn=2, fused=True, call='checkpoint'), world_size=2)"
    ),
    # A validator's parameters do not change; where they do, the caller gives up what has been gathered, as backward does otherwise.
    "parameters stay gathered after a call without autograd": (
        "Case('torchtitan.llama3_partial_dtensor', LlamaConfig(heads=2, kv_heads=2, ffn=2, mode='no_grad'), world_size=2, calls='twice')"
    ),
}


def right_path(name: str, case: Case) -> Case:
    """The case, kept off what is wrong."""
    config: Any = case.config
    size = case.world_size
    sizes = {field: getattr(config, field) for field in ("ffn", "vocab") if hasattr(config, field)}
    multiples = {field: -(-value // size) * size for field, value in sizes.items()}
    fields = {field: multiples[field] for field, value in sizes.items() if -(-value // size) * (size - 1) >= value}
    if name == "llama3" and config.meta:
        fields = multiples
    elif name == "llama3" and config.call == "logprobs":
        fields["vocab"] = multiples["vocab"]
    if name != "cross_entropy":
        fields["scaled"] = False
    return dataclasses.replace(case, config=dataclasses.replace(config, **fields))


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_is_wrong_is_found(finding: str) -> None:
    assert_found(*FINDINGS[finding])


@pytest.mark.parametrize("reason", LOOKS_WRONG)
def test_what_only_looks_wrong_holds(reason: str) -> None:
    assert found_on(LOOKS_WRONG[reason]) == set()


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_rest_holds(name: str, record_property: Recorder) -> None:
    ran = assert_cases_hold(SUBJECTS[name], lambda case: right_path(name, case), CASES, ("float64", "float32"))
    counted(record_property, ran, CASES)
