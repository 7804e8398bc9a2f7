"""transformers 5.24.0: what is wrong in its tensor- and expert-parallel decoders, what only looks so, and that the rest is right."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from released import (
    SCRIPTS,
    Recorder,
    a_few,
    assert_cases_hold,
    assert_found,
    assert_not_shown,
    assert_script_holds,
    assert_shown,
    counted,
    for_cases,
    found_on,
    subjects_of,
)

from tpverify.case import Case

SUBJECTS = subjects_of("transformers")

CASES_EACH = 5
"""Drawn of each family's right paths: a case loads a model on every rank."""

FINDINGS = {
    # ReplicatedWithGradAllReduce reduces the accumulated gradient in each backward: g, then W * g + g instead of g + g.
    "norms of heads sum what they have summed already": (
        "Case('transformers.qwen3', DecoderConfig(seq=4, heads=2, kv_heads=2), world_size=2, calls='twice')",
        "parameter-gradient",
        "q_norm.weight.grad",
    ),
    # The plan has no entry for mlp.act_fn, whose two scalars lie between a column- and a row-parallel layer.
    "a learned activation keeps each rank's part of its gradient": (
        "Case('transformers.apertus', DecoderConfig(seq=3, heads=2, kv_heads=2, width=4, ffn=4), world_size=2)",
        "parameter-gradient",
        "act_fn.alpha",
    ),
    # DtensorShardOperation cuts the checkpoint's fused gate|q|k|v before the operation Chunk takes it apart.
    "a fused checkpoint is cut before it is taken apart": (
        "Case('transformers.hrm_text', DecoderConfig(heads=2, kv_heads=2, call='loaded'), world_size=2)",
        "forward",
        "q_proj.weight",
    ),
    # The same where the parts are not equal: now their shapes do not fit.
    "a fused checkpoint of uneven parts is refused": (
        "Case('transformers.hrm_text', DecoderConfig(heads=2, kv_heads=2, ffn=3), world_size=2)",
        "execution",
        "ignore_mismatched_sizes",
    ),
    # Without autograd ColwiseParallel takes the local weight to be cut by rows, but the tied embedding's is cut by columns.
    "without autograd a tied head does not know that it is cut by columns": (
        "Case('transformers.llama', DecoderConfig(heads=2, kv_heads=2, tied=True, mode='no_grad', embedding='columns'), world_size=2)",
        "execution",
        "shapes cannot be multiplied",
    ),
    # AllReduceEP: no graph runs through the experts of a rank without tokens, so that its backward leaves out two reductions.
    "a rank without tokens leaves out its reductions in backward": (
        "Case('transformers.mixtral', DecoderConfig(heads=2, kv_heads=2, experts=2, active=1, expert_plan='all_reduce'), world_size=2, "
        "values='repeated')",
        "communication",
        "issue the same collective",
    ),
    # GptOssExperts.forward: one_hot has no class for the experts of other ranks, as other models have since 5.24.
    "experts of other ranks have no class": (
        "Case('transformers.gpt_oss', DecoderConfig(mode='no_grad', experts=2, active=1, expert_plan='all_reduce'), world_size=2)",
        "execution",
        "Class values must be smaller than num_classes",
    ),
    # Llama4TextMoe adds in place to its shared expert's output, a view that RowwiseParallel's to_local has made.
    "a parallel layer's output is added to in place": (
        "Case('transformers.llama4', DecoderConfig(heads=2, kv_heads=2, experts=2, active=1), world_size=2)",
        "execution",
        "is a view and is being modified inplace",
    ),
    # DtensorShardOperation._slice_and_cat takes the first interval of a rank that has none.
    "a rank without a part of packed weights cannot load": (
        "Case('transformers.llama4', DecoderConfig(heads=3, kv_heads=3, mode='no_grad', experts=2, active=1), world_size=3)",
        "execution",
        "list index out of range",
    ),
    # dt_proj is row-parallel, so that every rank masks its own heads with the mask of all.
    "a mask of all heads meets a rank's own heads": (
        "Case('transformers.doge', DecoderConfig(heads=4, kv_heads=4), world_size=2)",
        "execution",
        "must match the size of tensor b (4)",
    ),
}

ON_GLOO = {
    "norms of heads sum what they have summed already": "q_norm.weight.grad: expected",
    "a learned activation keeps each rank's part of its gradient": "mlp.act_fn.alpha_p.grad: expected",
    "a fused checkpoint is cut before it is taken apart": "self_attn.q_proj.weight]: expected",
    "a fused checkpoint of uneven parts is refused": "ignore_mismatched_sizes",
    "without autograd a tied head does not know that it is cut by columns": "shapes cannot be multiplied",
    "a rank without tokens leaves out its reductions in backward": "Is there a distributed collective mismatch in your code?",
    "experts of other ranks have no class": "Class values must be smaller than num_classes",
    "a parallel layer's output is added to in place": "is a view and is being modified inplace",
    "a rank without a part of packed weights cannot load": "list index out of range",
    "a mask of all heads meets a rank's own heads": "must match the size of tensor b (4)",
}
"""What the scripts show on real processes."""

LOOKS_WRONG = {
    # RowwiseParallel hides the bias from the local product, and adds it after the sum.
    "every rank holds the bias of a row-parallel layer": (
        "Case('transformers.llama', DecoderConfig(heads=2, kv_heads=2, bias=True, mode='no_grad'), world_size=2)"
    ),
    # DTensor compares padding_idx with the ids before it shifts them.
    "padding_idx lies beyond the rank's part of the table": (
        "Case('transformers.llama', DecoderConfig(batch=2, seq=5, heads=2, kv_heads=2, vocab=4, padding=3), world_size=2)"
    ),
    # Queries, keys and values are gathered, and cut by heads nowhere.
    "heads that do not divide are not refused": "Case('transformers.phi3', DecoderConfig(seq=4, heads=3, kv_heads=3), world_size=2)",
    # MlaKvAProjParallel sums the gradient of the part that by-passes the column-parallel kv_b_proj.
    "one rotary key serves the heads of all ranks": (
        "Case('transformers.deepseek_v2', DecoderConfig(seq=4, heads=2, kv_heads=2, experts=2, active=1), world_size=2)"
    ),
    # In all_to_all, a rank without tokens sends an empty row through its experts.
    "a rank without tokens takes part in all_to_all": (
        "Case('transformers.mixtral', DecoderConfig(heads=2, kv_heads=2, experts=2, active=1, expert_plan='all_to_all'), world_size=2, "
        "values='repeated')"
    ),
}

SUMMED_AGAIN = ("qwen3", "gemma3", "qwen3_moe", "apertus")
"""Families with norms of heads, whose gradients cannot be accumulated."""


def right_path(name: str, case: Case) -> Case:
    """The case, kept off what is wrong."""
    config: Any = case.config
    fields: dict[str, Any] = {}
    if name in ("llama4", "apertus"):
        fields["mode"] = "no_grad"
    if name in ("llama4", "hrm_text"):
        fields["ffn"] = 12
    if name == "hrm_text" and config.call in ("loaded", "saved"):
        fields["call"] = "logits"
    if config.tied and fields.get("mode", config.mode) == "no_grad":
        fields["embedding"] = "rows"
    if name == "gpt_oss":
        fields["kernel"] = "batched_mm"
    elif config.expert_plan == "all_reduce" and config.kernel == "eager":
        fields["expert_plan"] = "all_to_all"
    calls = "once" if name in SUMMED_AGAIN else case.calls
    return dataclasses.replace(case, config=dataclasses.replace(config, **fields), calls=calls)


@pytest.mark.parametrize("finding", FINDINGS)
def test_what_is_wrong_is_found(finding: str) -> None:
    assert_found(*FINDINGS[finding])


@pytest.mark.parametrize("reason", LOOKS_WRONG)
def test_what_only_looks_wrong_holds(reason: str) -> None:
    assert found_on(LOOKS_WRONG[reason]) == set()


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "doge"])
def test_the_rest_holds(name: str, record_property: Recorder) -> None:
    ran = assert_cases_hold(SUBJECTS[name], lambda case: right_path(name, case), CASES_EACH)
    counted(record_property, ran, CASES_EACH)


@pytest.mark.parametrize("name", a_few([name for name in SUBJECTS if name != "doge"], "llama", "hrm_text", "mixtral"))
def test_the_scripts_of_the_rest_find_nothing(name: str) -> None:
    subject = SUBJECTS[name]
    assert for_cases(subject, lambda case: right_path(name, case), lambda case: assert_script_holds(subject, case), SCRIPTS) >= SCRIPTS


@pytest.mark.parametrize("finding", a_few(ON_GLOO, "a learned activation keeps each rank's part of its gradient"))
def test_a_script_shows_it_on_gloo_without_tpverify(finding: str, tmp_path: Path) -> None:
    assert_shown(FINDINGS[finding][0], ON_GLOO[finding], tmp_path)


@pytest.mark.parametrize("reason", a_few(LOOKS_WRONG, "padding_idx lies beyond the rank's part of the table"))
def test_the_script_of_a_correct_case_exits_0(reason: str, tmp_path: Path) -> None:
    assert_not_shown(LOOKS_WRONG[reason], tmp_path)
