"""Planted bugs of whole models: positions, heads of the model, replicated parameters under sequence parallelism, order of parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpverify.mutants.mappings import mapping, same, summed
from tpverify.mutants.mutant import add_mutant, mutant
from tpverify.subjects.block import ParallelTransformerBlock, around_residual, transformer_block
from tpverify.subjects.language_model import ParallelBERT, ParallelGPT, VocabParallelHead
from tpverify.subjects.language_model_subjects import bert, gpt
from tpverify.subjects.mappings import gather_from_region, gather_sequence, scatter_to_region
from tpverify.subjects.mlp import ParallelMLP
from tpverify.subjects.parameters import with_bias
from tpverify.subjects.subject import Subject

DRIFT = "Megatron-LM, NeMo, Paddle: replicated parameters differ between ranks after the first step with sequence parallelism"


@mutant(
    "sequence parallel",
    gpt,
    "forward",
    origin="sequence parallelism with a rank that defaults to 0",
    module="blocks.0*",
    ranks="all",
)
class PositionsOfTheFirstPart(ParallelGPT):
    """Every rank takes its part of the sequence for the first one, and adds the first positions."""

    def own_part(self, sequence: Tensor) -> Tensor:
        """[s, ...] -> this rank's part."""
        return sequence.narrow(0, 0, len(sequence) // self.group.size()) if self.sequence_parallel else sequence


@mutant(
    "sequence parallel",
    bert,
    "forward",
    origin="one of several inputs of a sequence-parallel model is not cut like the others",
    module="embedding_norm*",
    ranks="all",
)
class TokenTypesOfTheFirstPart(ParallelBERT):
    """Positions are cut along the sequence by rank, but token types are those of the first tokens on every rank."""

    def own_part(self, sequence: Tensor) -> Tensor:
        """[s, ...] -> this rank's part."""
        if sequence.dim() > 1 and self.sequence_parallel:
            return sequence.narrow(0, 0, len(sequence) // self.group.size())
        return super().own_part(sequence)


@mutant(
    "addend counted once per rank",
    gpt,
    "forward",
    origin="embeddings that add positions to the masked rows before these are summed",
    diagnosis="added on every rank before a reduction",
    module="blocks.0*",
)
class PositionsAddedBeforeTheSum(ParallelGPT):
    """Every rank adds the positions to its partial lookup, and the reduction sums them."""

    def embed(self, ids: Tensor) -> Tensor:
        """Word and position embeddings."""
        word: Tensor = self.word(ids.t())
        positions = self.own_part(torch.arange(ids.shape[1]))
        embedded: Tensor = word + self.group.size() * self.position(positions).unsqueeze(1)
        return embedded


@mutant(
    "missing reduction",
    gpt,
    "parameter-gradient",
    origin="ml-cross-entropy, torchtitan: a fused loss replaces the output layer, whose backward would have summed over the shards",
    diagnosis="a missing all_reduce",
    module="*",
)
class HeadWithoutF(VocabParallelHead):
    """The hidden states' gradient is what this rank's part of the vocabulary contributes; nobody sums it."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        return super().forward(x) if self.sequence_parallel else with_bias(nn.functional.linear(x, self.weight), self.bias)


@mutant(
    "wrong adjoint",
    gpt,
    "parameter-gradient",
    origin="Megatron-LM: a gather that does not know whether a tensor-parallel operation follows",
    module="*",
    diagnosis="a missing all_reduce",
)
class HeadGathersAsForReplicas(VocabParallelHead):
    """Under sequence parallelism the sequence is gathered as for replicated work: backward keeps a part and sums nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        if not self.sequence_parallel:
            return super().forward(x)
        whole = gather_from_region(x, 0, [len(x)] * self.group.size(), self.group)
        return with_bias(nn.functional.linear(whole, self.weight), self.bias)


@mutant(
    "wrong adjoint",
    bert,
    "parameter-gradient",
    origin="Megatron-LM: gradients of a replicated layer doubled at TP = 2, where a gather sums what is the same on all ranks",
    module="*",
    diagnosis="one reduction too many",
)
class HiddenStatesCopiedTwice(VocabParallelHead):
    """Hidden states pass through f before the head, which applies f itself."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's logits."""
        if self.sequence_parallel or self.group.size() == 1:
            return super().forward(x)
        return super().forward(mapping(x, same, lambda grad: summed(grad, self.group)))


@mutant(
    "order",
    gpt,
    "forward",
    origin="layouts [batch, seq] and [seq, batch] confused at the very end: right for a batch of one",
    module="output",
)
class LossesReshaped(ParallelGPT):
    """Losses [s, b] are reshaped to [b, s] instead of being transposed."""

    def compute_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """[b, s], or [] for ``mean``."""
        losses = super().compute_loss(x, targets)
        return losses.t().reshape(losses.shape) if losses.dim() and self.group.size() > 1 else losses


@mutant(
    "order",
    gpt,
    "forward",
    origin="Megatron-LM: layers restored under stage-local names, so that other layers' weights are loaded",
    module="blocks.0*",
    diagnosis="modules in another order",
)
class BlocksBackwards(ParallelGPT):
    """On several ranks the blocks run from the last to the first."""

    def transform(self, x: Tensor) -> Tensor:
        """All blocks and the final norm."""
        blocks = list(self.blocks)
        for block in reversed(blocks) if self.group.size() > 1 else blocks:
            x = block(x)
        transformed: Tensor = self.final_norm(x)
        return transformed


@mutant(
    "normalisation",
    bert,
    "forward",
    origin="ports of BERT that normalise the word embeddings before token types are added",
    module="*",
    diagnosis="once too little",
)
class NormBeforeTokenTypes(ParallelBERT):
    """On several ranks token types are added after the norm of the embeddings."""

    def forward(self, ids: Tensor, token_types: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        if self.group.size() == 1:
            return super().forward(ids, token_types, targets)
        x = self.transform(self.embedding_norm(self.embed(ids)) + self.token_type(self.own_part(token_types.t())))
        return self.compute_loss(self.dense_norm(nn.functional.gelu(self.dense(x))), targets)


def _unflagged(base: Subject, *names: str) -> Any:
    """``base`` whose parameters of these names are not flagged for the reduction of sequence-parallel gradients."""

    def build(config: Any) -> nn.Module:
        module = base.parallel(config)
        for name, parameter in module.named_parameters():
            if name in names and hasattr(parameter, "sequence_parallel_group"):
                del parameter.sequence_parallel_group
        return module

    return build


for _id, _base, _names, _story in (
    ("positions-not-flagged", gpt, ("position.weight",), "The table of positions"),
    ("final-norm-not-flagged", gpt, ("final_norm.weight", "final_norm.bias"), "The final norm"),
    ("token-types-not-flagged", bert, ("token_type.weight",), "The table of token types"),
    ("dense-bias-not-flagged", bert, ("dense.bias",), "The bias of the dense layer before BERT's head"),
):
    add_mutant(
        _id,
        "replicated gradient",
        _base,
        "parameter-gradient",
        parallel=_unflagged(_base, *_names),
        communication=None,
        story=f"{_story} is left out when the gradients of replicated parameters are summed after backward.",
        origin=DRIFT,
        diagnosis="a missing all_reduce",
        module=f"{_names[0].rpartition('.')[0]}.*.grad",
    )


@mutant(
    "order",
    transformer_block,
    "forward",
    origin="GPT-J's arrangement in a model that is not GPT-J: attention and feed-forward network side by side",
    module="norm2",
    diagnosis="modules in another order",
)
class PartsSideBySide(ParallelTransformerBlock):
    """On several ranks the feed-forward network is given the block's input, not the output of attention."""

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        if self.arrangement != "pre_ln" or self.attention.qkv.group.size() == 1:
            return super().forward(x)
        output: Tensor = x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))
        return output


@mutant(
    "waste",
    transformer_block,
    "communication",
    origin="sequence parallelism that re-joins the sequence between a block's parts: right, and as slow as without it",
    module="",
    diagnosis="no further collective",
)
class SequenceJoinedBetween(ParallelTransformerBlock):
    """Under sequence parallelism the sequence is gathered and cut again between attention and feed-forward network."""

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        group = self.attention.qkv.group
        x = around_residual(x, self.attention, self.norm1, self.arrangement)
        if self.attention.qkv.sequence_parallel:
            sizes = [len(x)] * group.size()
            x = scatter_to_region(gather_from_region(x, 0, sizes, group), 0, sizes, group)
        return around_residual(x, self.mlp, self.norm2, self.arrangement)


@mutant(
    "wrong adjoint",
    transformer_block,
    "input-gradient",
    origin="Megatron-LM: a region of sequence parallelism left by the gather that is meant for the way into a column-parallel layer",
    module="x.grad",
    diagnosis="one reduction too many",
)
class SequenceJoinedBySummingGather(ParallelTransformerBlock):
    """Under sequence parallelism the sequence is gathered between the parts by a gather that sums in backward, and cut again."""

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        group = self.attention.qkv.group
        x = around_residual(x, self.attention, self.norm1, self.arrangement)
        if self.attention.qkv.sequence_parallel:
            x = scatter_to_region(gather_sequence(x, group), 0, [len(x)] * group.size(), group)
        return around_residual(x, self.mlp, self.norm2, self.arrangement)


@mutant(
    "detached",
    transformer_block,
    "input-gradient",
    origin="recomputation of activations that loses the graph where its input needs no gradient: the branch is not trained",
    module="x.grad",
    diagnosis="a detached branch",
)
class FeedForwardWithoutGraph(ParallelMLP):
    """On several ranks the feed-forward network is given a detached input, as recomputation may do."""

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        return super().forward(x.detach() if self.fc1.group.size() > 1 else x)


@mutant(
    "precision",
    gpt,
    "forward",
    origin="residual streams kept in half precision between layers whatever the model's dtype",
    module="*",
    diagnosis="rounding fits this",
)
class ResidualInSinglePrecision(ParallelGPT):
    """On several ranks the residual passes from block to block in float32."""

    def transform(self, x: Tensor) -> Tensor:
        """All blocks and the final norm."""
        return super().transform(x.float().to(x.dtype) if self.group.size() > 1 else x)


@mutant(
    "conditional",
    gpt,
    "forward",
    origin="squeezed dimensions: right for every shape but that of one token per rank",
    module="blocks.0*",
)
class FirstPositionIfOneTokenPerRank(ParallelGPT):
    """Where the sequence has as many tokens as there are ranks, every rank takes its one token for the first."""

    def own_part(self, sequence: Tensor) -> Tensor:
        """[s, ...] -> this rank's part."""
        own = super().own_part(sequence)
        return sequence[:1] if self.sequence_parallel and len(own) == 1 else own
