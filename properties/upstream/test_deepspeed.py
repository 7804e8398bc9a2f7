"""DeepSpeed 0.19.8: what is wrong in its tensor-parallel layers, what only looks so, and that the rest is right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from released import CASES, Recorder, assert_found, assert_holds, counted, found_on, shown_on_gloo, subjects_of

import tpverify as tpv
from tpverify.verification import read_case

SUBJECTS = subjects_of("deepspeed")

FINDINGS = {
    # ColumnParallel.backward reduces grad_output.contiguous(), which is a copy if the gradient is strided, and returns grad_output.
    # torch gives the gradient of a matrix that lies in memory by columns the same strides.
    "the sum over ranks of a strided gradient is thrown away": (
        "Case('deepspeed.linear_layer', LinearConfig(seq=2, in_features=2, out_features=2, bias=False), world_size=2, layout='transposed')",
        "input-gradient",
        "x.grad",
    ),
    "the same in fused layers": (
        "Case('deepspeed.fused_linear', FusedConfig(seq=2, blocks=(2, 2), other=2, kind='gate_up', bias=False), world_size=2, "
        "layout='transposed')",
        "input-gradient",
        "x.grad",
    ),
    # AsyncColumnParallel.backward: .view where .reshape is needed.
    "where communication overlaps a strided gradient is refused": (
        "Case('deepspeed.linear_layer', LinearConfig(seq=2, batch=2, bias=False, overlap=True), world_size=1, layout='transposed')",
        "execution",
        "view size is not compatible",
    ),
    "where communication overlaps a rank without features raises": (
        "Case('deepspeed.linear_layer', LinearConfig(bias=False, overlap=True), world_size=2)",
        "execution",
        "cannot reshape tensor of 0 elements",
    ),
    # VocabParallelEmbedding.forward looks ids of other ranks up in row 0, which there need not be.
    "a rank without rows of the table raises": (
        "Case('deepspeed.embedding', EmbeddingConfig(), world_size=2)",
        "execution",
        "self indexing axis dim should be positive",
    ),
    # conv_LinearLayer does not turn a Conv1D's weight round, as its sibling does, but multiplies as if it had.
    "a column-parallel Conv1D multiplies by the transposed weight": (
        "Case('deepspeed.conv_linear', ConvolutionConfig(in_features=2, out_features=2, bias=False), world_size=1)",
        "forward",
        "output",
    ),
    # Conv_LinearALlreduce turns the bias round as well.
    "a row-parallel Conv1D cannot have a bias": (
        "Case('deepspeed.conv_linear', ConvolutionConfig(row=True), world_size=1)",
        "execution",
        "Dimension out of range",
    ),
    # It cuts the input's features by the number of the output's.
    "a row-parallel Conv1D must be square": (
        "Case('deepspeed.conv_linear', ConvolutionConfig(out_features=2, bias=False, row=True), world_size=1)",
        "execution",
        "split_with_sizes expects",
    ),
    # shard_value_with_share_qk makes a parameter of an empty list.
    "a row-parallel layer of Yuan cannot have a bias": (
        "Case('deepspeed.yuan_linear', FusedConfig(kind='yuan', row=True), world_size=1)",
        "execution",
        "'list' object has no attribute 'detach'",
    ),
    # shared_qk_value_head_ids gives three heads a rank as two pairs, so that two heads lie on both ranks.
    "Yuan's heads are counted twice if a rank has an odd number of them": (
        "Case('deepspeed.yuan_linear', FusedConfig(blocks=(3, 3), kind='yuan', bias=False, row=True), world_size=2)",
        "rejection",
        "",
    ),
}

ON_GLOO = {
    "the sum over ranks of a strided gradient is thrown away": "x.grad: expected",
    "a rank without rows of the table raises": "self indexing axis dim should be positive",
    "a column-parallel Conv1D multiplies by the transposed weight": "output: expected",
    "a row-parallel layer of Yuan cannot have a bias": "'list' object has no attribute 'detach'",
}
"""What the scripts of some show on real processes."""

LOOKS_WRONG = {
    # AsyncColumnParallel sums the bias's gradient over the sequence only; autograd does the rest.
    "a bias's gradient has two dimensions": (
        "Case('deepspeed.linear_layer', LinearConfig(seq=3, batch=2, in_features=2, out_features=4, overlap=True), world_size=2)"
    ),
    # RowParallel reduces a copy as well, but its input is a product, and that is contiguous.
    "the sum over ranks of a strided output": (
        "Case('deepspeed.linear_allreduce', LinearConfig(seq=2, in_features=4, out_features=2, flat=True), world_size=2, "
        "layout='transposed')"
    ),
    # Only the owner has it; on other ranks these ids are masked.
    "padding_idx lies beyond the rank's part of the table": (
        "Case('deepspeed.embedding', EmbeddingConfig(seq=5, vocab=4, padding_idx=3), world_size=2, values='repeated')"
    ),
    # Every rank has the bias, and adds it after the sum.
    "an output head takes its part of a whole input": (
        "Case('deepspeed.embedding', EmbeddingConfig(seq=2, vocab=3, hidden=3, columns=True, tied=True), world_size=2, calls='twice')"
    ),
}

CORRECT = (
    "Case('deepspeed.fused_linear', FusedConfig(seq=3, blocks=(8, 2, 2), other=4, kind='Phi3DecoderLayer'), world_size=2)",
    "Case('deepspeed.vocab_parallel_cross_entropy', LossConfig(seq=3, vocab=5, reduction='items', causal=True), world_size=2)",
)

TAKES_ANY_LAYOUT = ("linear_allreduce", "conv_linear", "embedding", "vocab_parallel_cross_entropy")
"""Those without ``ColumnParallel``."""


def right_path(name: str, config: Any) -> dict[str, Any]:
    """What keeps it off the wrong paths, on up to 4 ranks."""
    if name == "linear_layer":
        return {"overlap": config.overlap and config.out_features >= 4}
    if name == "conv_linear":
        return {"row": True, "bias": False, "out_features": config.in_features}
    if name == "yuan_linear":
        return {"bias": config.bias and not config.row}
    if name == "embedding" and not config.columns and not config.tied:
        return {"vocab": max(config.vocab, 4)}
    return {}


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_is_wrong_is_found(finding: str) -> None:
    assert_found(*FINDINGS[finding])


@pytest.mark.parametrize("reason", LOOKS_WRONG)
def test_what_only_looks_wrong_holds(reason: str) -> None:
    assert found_on(LOOKS_WRONG[reason]) == set()


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_rest_holds(name: str, record_property: Recorder) -> None:
    ran = assert_holds(SUBJECTS[name], lambda config: right_path(name, config), layouts=name in TAKES_ANY_LAYOUT)
    counted(record_property, ran, CASES)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("linear_layer', LinearConfig(seq=2, out_features=4)", ["all_reduce backward"]),
        ("linear_layer', LinearConfig(seq=2, out_features=4, overlap=True)", ["all_reduce backward"]),
        ("linear_layer', LinearConfig(seq=2, out_features=4, gather=True)", ["all_gather forward", "all_reduce backward"]),
        ("linear_allreduce', LinearConfig(seq=2, in_features=4)", ["all_reduce forward"]),
        ("linear_allreduce', LinearConfig(seq=2, in_features=4, given='whole')", ["all_reduce forward", "all_reduce backward"]),
    ],
)
def test_its_collectives_are_those_of_such_a_layer(case: str, expected: list[str]) -> None:
    subject, parsed = read_case(f"Case('deepspeed.{case}, world_size=2)")
    collectives = [tpv.Collective(*each.split()) for each in expected]
    assert tpv.check_case(dataclasses.replace(subject, communication=lambda config, world_size: collectives), parsed) == []


@pytest.mark.parametrize("finding", ON_GLOO)
def test_a_script_shows_it_on_gloo_without_tpverify(finding: str, tmp_path: Path) -> None:
    code, printed = shown_on_gloo(FINDINGS[finding][0], tmp_path)
    assert code == 1 and ON_GLOO[finding] in printed, printed


@pytest.mark.parametrize("case", CORRECT)
def test_the_script_of_a_correct_case_exits_0(case: str, tmp_path: Path) -> None:
    code, printed = shown_on_gloo(case, tmp_path)
    assert code == 0 and printed.count(": expected ") >= 4 and "differs" not in printed, printed
