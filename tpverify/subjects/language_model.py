"""GPT and BERT from vocab-parallel embedding to vocab-parallel loss: whole logits exist on no rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpverify.subjects.block import BlockConfig, ParallelTransformerBlock, parallel_layer_norm
from tpverify.subjects.cross_entropy import VocabParallelCrossEntropy
from tpverify.subjects.embedding import VocabParallelEmbedding, vocab_weight
from tpverify.subjects.linear import column_parallel_product
from tpverify.subjects.mappings import Group, divide
from tpverify.subjects.parameters import INIT_STD, mark_sequence_parallel, with_bias

TOKEN_TYPES = 2


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(BlockConfig):
    """Sizes, elements, and options of a language model; its inputs are ids and targets, [batch, seq] each.

    Attributes:
        vocab, multiple: ids, and how they are padded (0: uneven shards).
        layers: number of blocks.
        positions: rows of the table of learned positions, at least ``seq``.
        tied: the output projection is the word embedding.
        reduction: ``none``: the output is a loss per token, [batch, seq]; ``mean``: a scalar.
    """

    vocab: int = 2
    multiple: int = 1
    layers: int = 1
    positions: int = 1
    tied: bool = True
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    reduction: str = "none"


def parameter_count(layers: int, hidden: int, vocab: int, positions: int) -> int:
    """Parameters of a tied GPT with biases and ``ffn = 4 * hidden``.

    A block has 12 * hidden^2 weights, 9 * hidden biases and two norms of 2 * hidden; the tables and the final norm come once.
    """
    return layers * (12 * hidden**2 + 13 * hidden) + (vocab + positions) * hidden + 2 * hidden


class VocabParallelHead(nn.Module):
    """Projection of hidden states to this rank's logits, which are not gathered.

    Args:
        weight: this rank's rows; the embedding's own parameter where the two are tied.
        bias: add a learned bias to each id's logit.

    Shapes: [s, b, hidden], or [s / world_size, b, hidden] under sequence parallelism -> [s, b, rows].
    """

    def __init__(self, weight: nn.Parameter, *, group: Group, bias: bool, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(len(weight))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        return with_bias(column_parallel_product(x, self.weight, self.group, self.sequence_parallel), self.bias)


class ParallelLanguageModel(nn.Module):
    """What GPT and BERT share: word and position embeddings, blocks, final norm, output projection, loss.

    Under sequence parallelism everything between the lookup and the output projection works on a part of the sequence.
    """

    def __init__(self, config: LanguageModelConfig, *, group: Group, head_bias: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, config.sequence_parallel
        self.word = VocabParallelEmbedding(
            config.vocab, config.hidden, group=group, multiple=config.multiple, sequence_parallel=config.sequence_parallel
        )
        self.position = self._table(config.positions, config.hidden)
        self.blocks = nn.ModuleList(ParallelTransformerBlock(config, group=group, layers=config.layers) for _ in range(config.layers))
        self.final_norm = nn.Identity() if config.arrangement == "post_ln" else self._norm(config.hidden)
        weight = self.word.weight if config.tied else vocab_weight(config.vocab, config.hidden, self.word.shard)
        self.head = VocabParallelHead(weight, group=group, bias=head_bias, sequence_parallel=config.sequence_parallel)
        self.loss = VocabParallelCrossEntropy(
            config.vocab,
            group=group,
            multiple=config.multiple,
            label_smoothing=config.label_smoothing,
            z_loss=config.z_loss,
            ignore_index=config.ignore_index,
            reduction=config.reduction,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Word and position embeddings: ids [b, s] -> [s, b, hidden], or this rank's part of the sequence."""
        positions = self.own_part(torch.arange(ids.shape[1], device=ids.device))
        embedded: Tensor = self.word(ids.t()) + self.position(positions).unsqueeze(1)
        return embedded

    def own_part(self, sequence: Tensor) -> Tensor:
        """[s, ...] -> the same, or this rank's part of it, [s / world_size, ...], under sequence parallelism.

        Raises:
            ValueError: the sequence does not divide by the world size.
        """
        if not self.sequence_parallel:
            return sequence
        part = divide(len(sequence), self.group.size(), "sequence length")
        return sequence.narrow(0, self.group.rank() * part, part)

    def transform(self, x: Tensor) -> Tensor:
        """All blocks and the final norm: [s, b, hidden] -> the same."""
        for block in self.blocks:
            x = block(x)
        transformed: Tensor = self.final_norm(x)
        return transformed

    def compute_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss: x [s, b, hidden], targets [b, s] -> [b, s], or [] for ``mean``."""
        losses: Tensor = self.loss(self.head(x), targets.t())
        return losses.t() if losses.dim() else losses

    def _norm(self, hidden: int) -> nn.LayerNorm:
        return parallel_layer_norm(hidden, self.group, self.sequence_parallel)

    def _table(self, rows: int, hidden: int) -> nn.Embedding:
        table = nn.Embedding(rows, hidden)
        nn.init.normal_(table.weight, std=INIT_STD)
        if self.sequence_parallel:
            mark_sequence_parallel(table.weight, self.group)
        return table


class ParallelGPT(ParallelLanguageModel):
    """Causal language model; ``config.causal`` should be True.

    Shapes: ids, targets [b, s] -> losses [b, s], or [] for ``mean``.

    Raises:
        ValueError: a size does not divide. IndexError: an id or target is not in the vocabulary (in ``forward``).
    """

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of predicting ``targets``."""
        return self.compute_loss(self.transform(self.embed(ids)), targets)


class ParallelBERT(ParallelLanguageModel):
    """Masked language model: token types, a norm over the embeddings, and a dense layer before the output projection.

    ``config.causal`` should be False. The dense layer is replicated.

    Shapes: ids, token_types, targets [b, s] -> losses [b, s], or [] for ``mean``.

    Raises:
        ValueError: a size does not divide. IndexError: an id or target is not in the vocabulary (in ``forward``).
    """

    def __init__(self, config: LanguageModelConfig, *, group: Group) -> None:
        super().__init__(config, group=group, head_bias=True)
        self.token_type = self._table(TOKEN_TYPES, config.hidden)
        self.embedding_norm = self._norm(config.hidden)
        self.dense = nn.Linear(config.hidden, config.hidden)
        nn.init.normal_(self.dense.weight, std=INIT_STD)
        nn.init.zeros_(self.dense.bias)
        self.dense_norm = self._norm(config.hidden)
        if config.sequence_parallel:
            mark_sequence_parallel(self.dense.weight, group)
            mark_sequence_parallel(self.dense.bias, group)

    def forward(self, ids: Tensor, token_types: Tensor, targets: Tensor) -> Tensor:
        """The loss of predicting ``targets``."""
        embedded = self.embed(ids) + self.token_type(self.own_part(token_types.t()))
        x = self.transform(self.embedding_norm(embedded))
        return self.compute_loss(self.dense_norm(nn.functional.gelu(self.dense(x))), targets)
