"""Published figures of tensor-parallel transformers, recomputed with the built-in layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tpverify.subjects.communication import column_row
from tpverify.subjects.cross_entropy_subject import loss_communication
from tpverify.subjects.embedding import vocab_shard
from tpverify.subjects.language_model import LanguageModelConfig, parameter_count
from tpverify.subjects.language_model_subjects import ReferenceGPT, gpt
from tpverify.subjects.mlp import activate
from tpverify.subjects.parameters import residual_init_std

X = torch.tensor([[1.0, 2.0]])
A = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
B = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
LARGEST = {"layers": 72, "hidden": 3072, "heads": 32, "batch": 8, "seq": 1024, "tp": 8}


def rounded(tensor: torch.Tensor) -> list[float]:
    """Three decimals; -0.0 as 0.0."""
    return [round(value, 3) + 0.0 for value in tensor.flatten().tolist()]


def test_gelu_at_three_points() -> None:
    """GELU(1), GELU(-1), GELU(2)."""
    assert rounded(activate(torch.tensor([1.0, -1.0, 2.0]), "gelu")) == [0.841, -0.159, 1.954]


def test_gelu_commutes_with_a_cut_by_columns_only() -> None:
    """Columns give the whole layer; rows with GELU before the sum give something else."""
    whole = activate(X @ A, "gelu")
    columns = torch.cat([activate(X @ A[:, rank : rank + 1], "gelu") for rank in range(2)], dim=1)
    rows = torch.stack([activate(X[:, rank : rank + 1] @ A[rank : rank + 1], "gelu") for rank in range(2)]).sum(0)
    assert rounded(whole) == [-0.159, 0.841]
    assert torch.equal(columns, whole)
    assert rounded(rows) == [0.796, 1.796]


def test_row_parallel_partials_sum_to_the_whole() -> None:
    """The second matrix, cut by rows: two partial results and their sum."""
    hidden = activate(X @ A, "gelu")
    partials = [hidden[:, rank : rank + 1] @ B[rank : rank + 1] for rank in range(2)]
    assert [rounded(partial) for partial in partials] == [[-0.317, 0.0], [0.841, 0.841]]
    assert rounded(partials[0] + partials[1]) == [0.524, 0.841]
    assert rounded(F.linear(hidden, B.t())) == [0.524, 0.841]


def test_traffic_of_the_largest_model() -> None:
    """Four all_reduces a layer, each of the whole activation: 288 in all and 14.5 GB at 2 bytes."""
    elements = LARGEST["seq"] * LARGEST["batch"] * LARGEST["hidden"]
    of_layer = 2 * column_row("column", "row", elements, sequence_parallel=False)
    messages = [message for message in of_layer for _ in range(message.count * LARGEST["layers"])]
    assert {message.elements for message in messages} == {25_165_824}
    assert len(messages) == 288
    assert round(sum(2 * (message.elements or 0) for message in messages) / 1e9, 1) == 14.5


def test_a_language_model_reduces_2_l_plus_1_times_each_way() -> None:
    """2L + 1 + loss forward and 2L + 1 backward."""
    config = LanguageModelConfig(seq=2, batch=3, hidden=8, heads=2, kv_heads=2, ffn=2, vocab=5, layers=7, positions=2)
    assert gpt.communication is not None
    expected = gpt.communication(config, 2)
    for phase, count in (("forward", 2 * 7 + 1), ("backward", 2 * 7 + 1)):
        assert sum(c.count for c in expected if c.phase == phase and c.elements == 2 * 3 * 8) == count
    assert sum(c.count for c in expected if c.elements == 2 * 3) == 3
    assert {c.kind for c in expected} == {"all_reduce"}


def test_parallel_loss_against_gathered_logits() -> None:
    """Whole logits would be 51,200 times what one exchanged number per token is."""
    tokens = LARGEST["seq"] * LARGEST["batch"]
    sizes = {message.elements for message in loss_communication(tokens, 0.0, "loss")}
    padded = sum(vocab_shard(50_257, 128, rank, LARGEST["tp"]).rows for rank in range(LARGEST["tp"]))
    assert sizes == {8_192}
    assert tokens * padded == 419_430_400
    assert tokens * padded // 8_192 == 51_200


def test_vocabulary_padding() -> None:
    """50,257 ids on 8 ranks: 6,400 rows each, the 943 that pad all on the last rank."""
    shards = [vocab_shard(50_257, 128, rank, 8) for rank in range(8)]
    assert [shard.rows for shard in shards] == [6_400] * 8
    assert [shard.rows - (shard.stop - shard.start) for shard in shards] == [0] * 7 + [943]


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "without_positions", "padded"),
    [(40, 1536, 16, 1.21, 1.21), (54, 1920, 20, 2.49, 2.49), (64, 2304, 24, 4.19, 4.20), (72, 3072, 32, 8.31, 8.32)],
)
def test_parameter_counts(layers: int, hidden: int, heads: int, without_positions: float, padded: float) -> None:
    """Billions of parameters: with 50,257 ids and no table of positions, and with 51,200 rows and 1,024 positions."""
    assert round(parameter_count(layers, hidden, 50_257, 0) / 1e9, 2) == without_positions
    assert round(parameter_count(layers, hidden, 51_200, 1_024) / 1e9, 2) == padded
    assert hidden // heads == 96


def test_parameter_count_is_that_of_the_model() -> None:
    """The formula counts what the reference holds."""
    config = LanguageModelConfig(hidden=6, heads=3, kv_heads=3, ffn=24, vocab=11, layers=2, positions=5)
    counted = sum(parameter.numel() for parameter in ReferenceGPT(config).parameters())
    assert counted == parameter_count(2, 6, 11, 5)


def test_initial_standard_deviations() -> None:
    """0.02, and 0.02 / sqrt(2L) where a layer writes into the residual."""
    assert round(residual_init_std(72), 5) == 0.00167
