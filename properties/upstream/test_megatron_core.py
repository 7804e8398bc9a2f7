"""megatron-core: what is wrong in its tensor-parallel layers, mappings, losses and models, what looks wrong, and that the rest is right."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from megatron_core_cases import FINDINGS, LATENT, LOOKS_WRONG
from released import (
    CASES,
    SCRIPTS,
    Recorder,
    a_few,
    assert_found,
    assert_holds,
    assert_not_shown,
    assert_script_holds,
    assert_shown,
    counted,
    for_cases,
    found_on,
    on_right_path,
    subjects_of,
)
from torch import Tensor

import tpverify as tpv
from tpverify.adapters.libraries import LIBRARIES
from tpverify.case import Case
from tpverify.lookup import read_case
from tpverify.sharding import Block, FusedShard, Replicate, Shard, unshard
from tpverify.strategies import cases

SUBJECTS = subjects_of("megatron_core")
VERSION = LIBRARIES["megatron_core"].version


def _unfrozen(config: Any) -> dict[str, Any]:
    return {"frozen": config.frozen and not config.bias and not config.qkv_bias}


def _computed(config: Any) -> dict[str, Any]:
    frozen = _unfrozen(config)["frozen"]
    divisible = 12 if config.recompute == "distributed" else config.hidden
    return {"frozen": frozen, "recompute": "" if frozen else config.recompute, "hidden": divisible}


RIGHT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "column_parallel_linear": lambda c: {"frozen": c.frozen and not c.bias},
    "vocab_parallel_cross_entropy": lambda c: {"reuse": False, "label_smoothing": 0.0},
    "branches": lambda c: {"mapping": "scatter_sequence", "seq": 12} if c.mapping in ("copy", "reduce") else {},
    "self_attention": _unfrozen,
    "gated_self_attention": lambda c: {**_unfrozen(c), "groups": c.heads},
    "transformer_layer": _unfrozen,
    "gpt": lambda c: {**_computed(c), "gathered": False, "fused_loss": False},
    "gpt_logits": _computed,
    "moe": lambda c: {"per_token": c.per_token and VERSION != "0.16.1"},
}
"""By subject, what keeps a config off the wrong paths."""

STRIDED = ("row_parallel_linear", "vocab_parallel_embedding", "transformer_layer", "gpt", "gpt_logits")
"""Subjects that take strided inputs and gradients with all their options."""

ONE_TOKEN = {"seq": 1, "sequence_parallel": False}

APART = ("fused_vocab_parallel_cross_entropy", "latent_self_attention")
"""Subjects with a test of their own: a dtype, or all but a few tensors, are right."""


@pytest.mark.parametrize("name", FINDINGS)
def test_what_is_wrong_is_found(name: str) -> None:
    finding = FINDINGS[name]
    if finding.fixed and VERSION != "0.16.1":
        assert found_on(finding.case) == set()
    else:
        assert_found(finding.case, finding.check, finding.says)


@pytest.mark.parametrize("reason", LOOKS_WRONG)
def test_what_looks_wrong_is_right(reason: str) -> None:
    assert found_on(LOOKS_WRONG[reason]) == set()


@pytest.mark.parametrize("name", sorted(set(SUBJECTS) - set(APART)))
def test_the_rest_holds(name: str, record_property: Recorder) -> None:
    counted(record_property, assert_holds(SUBJECTS[name], RIGHT.get(name, lambda config: {}), layouts=name in STRIDED), CASES)


@pytest.mark.parametrize("name", sorted(set(SUBJECTS) - {"fused_vocab_parallel_cross_entropy"}))
def test_the_scripts_of_the_rest_find_nothing(name: str) -> None:
    subject, right = SUBJECTS[name], RIGHT | {"latent_self_attention": lambda config: ONE_TOKEN}
    changed = on_right_path(right.get(name, lambda config: {}), layouts=name in STRIDED)
    assert for_cases(subject, changed, lambda case: assert_script_holds(subject, case), SCRIPTS) >= SCRIPTS


@pytest.mark.parametrize("name", a_few(FINDINGS, "each rank smooths over its own shard", "a frozen weight takes the bias's gradient"))
def test_a_script_shows_it_on_gloo_without_tpverify(name: str, tmp_path: Path) -> None:
    finding = FINDINGS[name]
    if finding.shown and not (finding.fixed and VERSION != "0.16.1"):
        assert_shown(finding.case, finding.shown, tmp_path)
    else:
        assert_not_shown(finding.case, tmp_path)


@pytest.mark.parametrize("reason", a_few(LOOKS_WRONG, "an ignored target has a loss, and a gradient: the caller masks both"))
def test_the_script_of_a_correct_case_exits_0(reason: str, tmp_path: Path) -> None:
    assert_not_shown(LOOKS_WRONG[reason], tmp_path)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mapping_has_its_adjoint(world_size: int) -> None:
    from tpverify.adapters.megatron_core.mappings import FLAT, MAPPINGS

    sizes = f"seq={2 * world_size}, hidden={2 * world_size}"
    for subject, names in (("mappings", MAPPINGS), ("flat_mappings", FLAT)):
        for name in names:
            case = f"Case('megatron_core.{subject}', RegionConfig({name!r}, {sizes}), world_size={world_size}, calls='interleaved')"
            assert found_on(case) == set(), name


def test_the_fused_loss_holds_in_bfloat16() -> None:
    subject = SUBJECTS["fused_vocab_parallel_cross_entropy"]

    @hypothesis.seed(0)
    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(subject, (1, 2, 3, 4), dtypes=("bfloat16",)))
    def holds(case: Case) -> None:
        assert tpv.check_case(subject, replace(case, layout="contiguous")) == []

    holds()


@pytest.mark.parametrize("options", ["", ", query_rank=8", ", query_rank=4, qk_norm=True, sequence_parallel=True", ", bias=False, batch=2"])
def test_of_latent_attention_only_the_rotary_key_is_wrong(options: str) -> None:
    """Hence the input too; but for a norm of the queries without sequence parallelism, whose gradient is another finding."""
    subject, case = read_case(f"Case('megatron_core.latent_self_attention', {LATENT}{options}), world_size=2)")
    wrong = {violation.tensor.removesuffix(".grad") for violation in tpv.check_case(subject, case)}
    assert wrong == {"x", "linear_kv_down_proj.weight"}


def test_latent_attention_holds_for_one_token(record_property: Recorder) -> None:
    """Its key has no gradient."""
    counted(record_property, assert_holds(SUBJECTS["latent_self_attention"], lambda config: ONE_TOKEN, layouts=False), CASES)


def _simulated(program: Callable[[], Any], world_size: int) -> list[Any]:
    subject = SUBJECTS["gpt"]
    with subject.context_for(None):
        return list(tpv.simulate(program, world_size, rank_local=subject.rank_local).results)


def _parameters(case: str) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """As they start, by rank and name, and their placements."""
    subject, parsed = read_case(case)
    placements = subject.placements_for(parsed.config)
    found = _simulated(lambda: dict(subject.parallel(parsed.config).named_parameters()), parsed.world_size)
    return found, {name: next(item.value for key, item in placements.items() if fnmatchcase(name, key)) for name in found[0]}


MODEL = "hidden=4, heads=2, groups=2, head_dim=4, ffn=2, gated=True, qk_norm=True, tied=False"


def test_cpu_initialization_makes_one_model_whatever_the_tp_degree() -> None:
    (whole,), _ = _parameters(f"Case('megatron_core.gpt', GPTConfig({MODEL}), world_size=1)")
    parts, placements = _parameters(f"Case('megatron_core.gpt', GPTConfig({MODEL}), world_size=2)")
    for name, layout in placements.items():
        assert torch.equal(unshard([part[name] for part in parts], layout, whole[name].shape), whole[name]), name


def test_learned_sinks_start_equal_on_every_rank() -> None:
    """Wrong: each rank draws its own heads' offsets from the same numbers, and so do all draws after it."""
    parts, _ = _parameters(f"Case('megatron_core.gpt', GPTConfig({MODEL}, softmax='learnable'), world_size=2)")
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    assert torch.equal(parts[0][name], parts[1][name])


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_gradient_norm_counts_every_parameter_once(softmax: str) -> None:
    """Wrong for learned sinks, whose shards count on rank 0 only (Megatron-LM issue 7452 (8))."""
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    subject, case = read_case(f"Case('megatron_core.gpt', GPTConfig({MODEL}, softmax={softmax!r}), world_size=2)")
    placements = _parameters(repr(case))[1]
    counted = _simulated(
        lambda: {
            name: param_is_not_tensor_parallel_duplicate(parameter) for name, parameter in subject.parallel(case.config).named_parameters()
        },
        2,
    )
    wrong = {name for name, layout in placements.items() if counted[1][name] == isinstance(layout, Replicate) or not counted[0][name]}
    sinks = {"decoder.layers.0.self_attention.core_attention.softmax_offset"}
    assert wrong == (sinks if softmax == "learnable" else set())


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_stride_cuts_each_block_of_the_initial_weight_by_itself(kind: str) -> None:
    from megatron.core import tensor_parallel as tp

    from tpverify.adapters.megatron_core.environment import begin, transformer_config

    def weight(stride: int) -> Tensor:
        begin()
        common: dict[str, Any] = {"config": transformer_config(), "init_method": torch.nn.init.normal_, "bias": False, "stride": stride}
        if kind == "column":
            layer: Any = tp.ColumnParallelLinear(3, 8, **common)
        else:
            layer = tp.RowParallelLinear(8, 3, input_is_parallel=True, skip_bias_add=False, **common)
        found: Tensor = layer.weight.detach()
        return found

    dim = 0 if kind == "column" else 1
    (whole,) = _simulated(lambda: weight(1), 1)
    for stride, layout in ((1, Shard(dim)), (2, FusedShard(dim, (Block(4), Block(4))))):
        assert torch.equal(unshard(_simulated(lambda: weight(stride), 2), layout, whole.shape), whole)  # noqa: B023


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_a_router_needs_transformer_engine_in_one_version() -> None:
    """Wrong in 0.16.1: it asks whether a name is None that is not defined without Transformer Engine."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    with pytest.raises(NameError) if VERSION == "0.16.1" else contextlib.nullcontext():
        router_gating_linear(torch.ones(1, 1, 2), torch.ones(3, 2), None, torch.float32)


def test_latent_attention_cannot_be_built_from_the_local_specification() -> None:
    """Wrong (Megatron-LM issue 1589): its core attention takes no ``k_channels``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from tpverify.adapters.megatron_core.environment import begin, transformer_config

    def build() -> None:
        begin()
        config = transformer_config(False, MLATransformerConfig, kv_channels=2)
        build_module(get_gpt_layer_local_spec(multi_latent_attention=True), config=config, layer_number=1)

    with pytest.raises(tpv.RankError, match="k_channels"):
        _simulated(build, 1)
