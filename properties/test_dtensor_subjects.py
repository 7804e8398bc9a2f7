"""PyTorch's own tensor parallelism: plans with a bug are caught, and what released DTensor does wrong is shown, not hidden.

The subjects' green path is in ``test_subjects.py``. It leaves out exactly the cases that the second half of this file is about.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module

import tpverify as tpv
from tpverify.case import Case
from tpverify.current_group import tp_group
from tpverify.subjects.dtensor import loss_parallel_outside, take_dtensor, tp_mesh
from tpverify.subjects.dtensor_attention import DTensorAttentionConfig, dtensor_attention
from tpverify.subjects.dtensor_embedding import DTensorEmbeddingConfig, dtensor_embedding
from tpverify.subjects.dtensor_llama import DTensorLlamaConfig, Llama, dtensor_llama, llama_plan, parallel_llama
from tpverify.subjects.dtensor_loss import DTensorLossConfig, dtensor_loss
from tpverify.subjects.dtensor_mlp import DTensorMLPConfig, dtensor_mlp, mlp_plan, parallel_mlp
from tpverify.subjects.subject import Collective, Input, Subject
from tpverify.violation import Violation

KNOWN = torch.__version__.startswith("2.13.")
"""The release in which all of the discrepancies below were seen, here and on gloo processes."""

LLAMA = DTensorLlamaConfig(batch=2, seq=4, heads=4, kv_heads=2, ffn=4, vocab=6, plan="sequence")


def found(subject: Subject, config: object, world_size: int, seed: int = 0) -> list[Violation]:
    return tpv.check_case(subject, Case(subject.name, config, world_size, seed))


def named(violations: list[Violation]) -> set[tuple[str, str]]:
    return {(violation.check, violation.tensor) for violation in violations}


def without_reduction(config: DTensorMLPConfig) -> nn.Module:
    """w2 hands over its partial sums as if they were the output."""
    return parallel_mlp(config, {**mlp_plan(config), "w2": RowwiseParallel(output_layouts=Partial())})


def without_w2(config: DTensorMLPConfig) -> nn.Module:
    """w2 is not in the plan."""
    return parallel_mlp(config, {name: style for name, style in mlp_plan(config).items() if name != "w2"})


def plain_norm(config: DTensorLlamaConfig) -> nn.Module:
    """The last norm works on a part of the sequence and nobody knows."""
    return parallel_llama(config, {name: style for name, style in llama_plan(config).items() if name != "norm"})


def test_a_reduction_that_is_forgotten_is_caught() -> None:
    """Forward is wrong, by exactly what the other ranks' sums are; gradients are right."""
    violations = found(replace(dtensor_mlp, parallel=without_reduction), DTensorMLPConfig(seq=2, hidden=3, ffn=4), 2)
    assert {("forward", "output"), ("communication", "")} <= named(violations)
    assert not any(violation.check == "parameter-gradient" for violation in violations)


def test_a_layer_that_is_not_in_the_plan_is_caught() -> None:
    """Its parameters are no DTensors, so that nothing says how they are cut; said to be replicated, they do not fit their input."""
    config = DTensorMLPConfig(seq=2, hidden=3, ffn=4)
    subject = replace(dtensor_mlp, parallel=without_w2)
    with pytest.raises(tpv.SubjectError, match="got none for 'w2.weight'"):
        found(subject, config, 2)
    assert named(found(replace(subject, placements={"w2.*": Replicate()}), config, 2)) == {("execution", "")}


def test_a_norm_that_is_not_sequence_parallel_is_caught() -> None:
    """Silent in training: the output is right, and each rank's norm weight learns from its own tokens only."""
    violations = found(replace(dtensor_llama, parallel=plain_norm), LLAMA, 2)
    assert named(violations) >= {("parameter-gradient", "norm.weight.grad"), ("replication", "norm.weight.grad")}
    assert not any(violation.check == "forward" for violation in violations)


def test_the_unplanted_twins_are_clean() -> None:
    assert found(dtensor_mlp, DTensorMLPConfig(seq=2, hidden=3, ffn=4), 2) == []
    assert found(dtensor_llama, LLAMA, 2) == []


# What released DTensor does. On the release in which it was seen the violation must show; on others the case is either right
# or violated in the same way.


def shows(violations: list[Violation], check: str, text: str) -> bool:
    return any(violation.check == check and text in violation.message for violation in violations)


def expect_discrepancy(subject: Subject, config: object, world_size: int, check: str, text: str) -> None:
    violations = found(subject, config, world_size)
    if violations or KNOWN:
        assert shows(violations, check, text), violations


@pytest.mark.parametrize("world_size", [1, 2])
def test_class_weights_with_ignored_targets(world_size: int) -> None:
    """``loss_parallel``'s backward looks up the weight of every target, also of ignored ones, which are no classes."""
    config = DTensorLossConfig(seq=6, batch=2, vocab=4, weighted=True)
    expect_discrepancy(dtensor_loss, config, world_size, "execution", "index -100 is out of bounds")
    assert found(dtensor_loss, replace(config, ignore_index=0), world_size) == []


@pytest.mark.parametrize(("vocab", "world_size"), [(5, 4), (2, 3)])
def test_a_loss_on_a_rank_without_ids(vocab: int, world_size: int) -> None:
    """That rank leaves out the reduction of the maximum: its sum of exponentials meets the other ranks' maxima."""
    config = DTensorLossConfig(seq=3, vocab=vocab, dtensor_input=True)
    expect_discrepancy(dtensor_loss, config, world_size, "communication", "they differ in reduce op")


class LogSoftmax(nn.Module):
    """``log_softmax`` by itself: [b, s, v] -> the same."""

    def forward(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, dim=-1)


def parallel_log_softmax(config: DTensorLossConfig) -> nn.Module:
    module = LogSoftmax()
    take_dtensor(module, tp_mesh(), tpv.Shard(2), (config.batch, config.seq, config.vocab))
    return module


log_softmax = Subject(
    name="log_softmax",
    reference=lambda c: LogSoftmax(),
    parallel=parallel_log_softmax,
    configs=dtensor_loss.configs,
    inputs=lambda c: {"logits": Input((c.batch, c.seq, c.vocab), placement=tpv.Shard(2))},
    outputs=tpv.Shard(2),
    context=lambda c: loss_parallel_outside(),
)


def test_log_softmax_under_loss_parallel() -> None:
    """Backward of ``log_softmax`` does nothing there, since that of ``cross_entropy`` does all: by itself it is silently wrong."""
    config = DTensorLossConfig(seq=2, vocab=4)
    expect_discrepancy(log_softmax, config, 2, "input-gradient", "Expected logits.grad to equal the reference")
    assert not shows(found(log_softmax, config, 2), "forward", "")
    assert found(replace(log_softmax, context=None), config, 2) == []


def test_a_lookup_on_a_rank_without_ids() -> None:
    """RowwiseParallel: that rank looks ids up in an empty table and raises; the others would wait for it."""
    config = DTensorEmbeddingConfig(seq=3, vocab=5, hidden=2)
    expect_discrepancy(dtensor_embedding, config, 4, "execution", "index_select")
    assert found(dtensor_embedding, replace(config, vocab=7), 4) == []


def test_a_sharded_dimension_of_size_one() -> None:
    """It is lost in reshapes, which are then refused, even where nothing is cut."""
    config = DTensorMLPConfig(batch=2, seq=1, hidden=3, ffn=1)
    expect_discrepancy(dtensor_mlp, config, 1, "execution", "sharded dimension 2")


def test_a_row_parallel_bias_is_cut_in_parts() -> None:
    """Each rank adds bias / world_size before the reduction, which rounds, where adding the bias after it would be exact."""
    case = Case("dtensor_mlp", DTensorMLPConfig(seq=4, hidden=6, ffn=6, activation="relu"), 3, values="integers")
    violations = tpv.check_case(replace(dtensor_mlp, exact=True), case)
    if violations or KNOWN:
        assert {check for check, _ in named(violations)} == {"forward"}
    assert tpv.check_case(dtensor_mlp, case) == []
    without_bias = replace(case, config=replace(case.config, bias=False))
    assert tpv.check_case(replace(dtensor_mlp, exact=True), without_bias) == []


def test_an_uneven_sequence_as_plain_tensors() -> None:
    """Neither computed nor refused: each rank takes its own length times the world size for the whole, and messages differ in size."""
    config = DTensorMLPConfig(seq=5, hidden=3, ffn=4, input="sequence")
    expect_discrepancy(dtensor_mlp, config, 2, "communication", "all_gather")
    assert found(dtensor_mlp, replace(config, dtensor_input=True), 2) == []


@pytest.mark.parametrize(
    ("subject", "config"),
    [
        (dtensor_mlp, DTensorMLPConfig(seq=2, hidden=3, ffn=5)),
        (dtensor_attention, DTensorAttentionConfig(seq=2, heads=3, kv_heads=3, head_dim=2)),
    ],
)
def test_uneven_features_as_plain_tensors_are_refused(subject: Subject, config: object) -> None:
    """With the same cause as above, but refused; not with a ValueError."""
    assert found(subject, config, 2) == []
    (violation,) = found(replace(subject, refusal=ValueError), config, 2)
    assert violation.check == "rejection" and "RuntimeError" in violation.message


def untied(config: DTensorLlamaConfig) -> nn.Module:
    return parallelize_module(Llama(config), tp_mesh(), llama_plan(config))


def test_parallelize_module_unties_tied_weights() -> None:
    """Two parameters where there was one, each with the gradient of its own use: re-tie them afterwards."""
    config = replace(LLAMA, tied=True)
    assert found(dtensor_llama, config, 2) == []
    subject = replace(dtensor_llama, parallel=untied)
    expect_discrepancy(subject, config, 2, "tied", "to be one parameter, as in the reference")


@dataclass(frozen=True)
class MaskConfig:
    heads: int = 4
    seq: int = 3


class CausalMask(nn.Module):
    """Keeps what lies above the diagonal of each head's scores: [heads, s, s] -> the same."""

    def forward(self, scores: Tensor) -> Tensor:
        return torch.triu(scores, 1)


def parallel_mask(config: MaskConfig) -> nn.Module:
    module = CausalMask()
    take_dtensor(module, tp_mesh(), tpv.Shard(0), (config.heads, config.seq, config.seq))
    return module


def test_triu_gathers_the_heads() -> None:
    """Right but wasteful: every rank gathers all heads' scores for what it could do with its own; only the ledger tells."""
    subject = Subject(
        name="causal_mask",
        reference=lambda c: CausalMask(),
        parallel=parallel_mask,
        configs=st.just(MaskConfig()),
        inputs=lambda c: {"scores": Input((c.heads, c.seq, c.seq), placement=tpv.Shard(0))},
        communication=lambda c, world_size: [],
    )
    expect_discrepancy(subject, MaskConfig(), 2, "communication", "all_gather(float64[2, 3, 3])")


def test_loss_parallel_outlives_an_exception() -> None:
    """Its handlers stay for the rest of the process, where no run may leave them."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    try:
        with contextlib.suppress(KeyError), loss_parallel():
            raise KeyError
        assert handlers != before or not KNOWN
    finally:
        handlers.clear()
        handlers.update(before)
    with contextlib.suppress(KeyError), loss_parallel_outside():
        assert handlers != before
        raise KeyError
    assert handlers == before
    found(dtensor_loss, DTensorLossConfig(seq=6, batch=2, vocab=4, weighted=True), 2)
    assert handlers == before


def test_meshes_of_a_world_and_of_its_parts() -> None:
    """Two TP groups in one world, by ``DeviceMesh.from_group``; the world, by ``init_device_mesh``."""
    config = DTensorMLPConfig(seq=2, hidden=3, ffn=4)
    for groups in ("world", "blocks", "strided"):
        assert tpv.check_case(dtensor_mlp, Case("dtensor_mlp", config, 2, groups=groups)) == []


def test_what_is_only_recorded_and_what_is_declared() -> None:
    """Weights with fewer features than ranks are gathered, for which nothing is declared; otherwise the ledger is exact."""
    assert dtensor_mlp.communication is not None
    few = DTensorMLPConfig(seq=2, hidden=3, ffn=2, local_hidden=False)
    assert dtensor_mlp.communication(few, 3) is None and found(dtensor_mlp, few, 3) == []
    wrong = replace(dtensor_mlp, communication=lambda c, world_size: [Collective("all_reduce", "forward", "*", 2)])
    assert named(found(wrong, few, 3)) == {("communication", "")}


def test_a_mesh_is_the_rank_s_own() -> None:
    def program() -> tuple[int, ...]:
        mesh = tp_mesh()
        total = DTensor.from_local(torch.tensor([mesh.get_local_rank()]), mesh, [Partial()]).redistribute(placements=[Replicate()])
        return mesh.size(), tp_group().size(), int(total.to_local())

    assert tpv.simulate(program, 3).results == [(3, 3, 3)] * 3
