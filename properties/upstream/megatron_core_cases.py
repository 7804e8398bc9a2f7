"""megatron-core: what is wrong in its tensor-parallel layers, mappings, losses and models, and what only looks wrong: the cases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A case that violates a check.

    Attributes:
        case: the smallest.
        check, says: which check finds it, and in which words.
        shown: what its script prints on real processes; "" if the numbers come out right there.
        fixed: the first version tried that no longer has it, or "" if every one does.
        upstream: where it is known, or "" if no report of it was found.
    """

    case: str
    check: str
    says: str
    shown: str = ""
    fixed: str = ""
    upstream: str = ""


LATENT = "LatentAttentionConfig(seq=2, heads=2, rank=8, rotary_dim=4"
GPT = "GPTConfig(hidden=4, heads=2, groups=2, head_dim=2, ffn=2, gathered=True)"

FINDINGS = {
    # VocabParallelCrossEntropy subtracts and takes exponentials in place; .float() of float32 logits is no copy.
    "the loss overwrites the logits": Finding(
        "Case('megatron_core.vocab_parallel_cross_entropy', CrossEntropyConfig(reuse=True), world_size=1)",
        "forward",
        "output[1]",
        shown="output[1]: expected",
        upstream="Megatron-LM pull request 1594",
    ),
    # The smoothing's weight and the mean of log-probabilities are those of the rank's shard, not of the vocabulary.
    "each rank smooths over its own shard": Finding(
        "Case('megatron_core.vocab_parallel_cross_entropy', CrossEntropyConfig(vocab=4, label_smoothing=0.1), world_size=2)",
        "replication",
        "output",
        shown="rank 0: output: expected [[1.9450",
        upstream="Megatron-LM issues 737, 7464 and 7452 (1)",
    ),
    # _VocabParallelCrossEntropy.backward ends with .to(torch.bfloat16), whatever the dtype of the logits.
    "the fused loss rounds its gradient to bfloat16": Finding(
        "Case('megatron_core.fused_vocab_parallel_cross_entropy', CrossEntropyConfig(fused=True), world_size=1)",
        "input-gradient",
        "logits.grad",
        shown="logits.grad: expected",
    ),
    # Whole logits on every rank meet a loss that takes them for shards: each exponential is summed once per rank.
    "the loss of gathered logits is too large by log(TP)": Finding(
        f"Case('megatron_core.gpt', {GPT}, world_size=2)",
        "forward",
        "output",
        shown="output: expected [[5.4968",
        upstream="Megatron-LM issue 7452 (2)",
    ),
    # One rank's gather hands its input on as it is; the loss then overwrites a view, and autograd refuses to go back.
    "gathered logits have no backward on one rank": Finding(
        f"Case('megatron_core.gpt', {GPT}, world_size=1)",
        "execution",
        "rank 0 raised RuntimeError",
        shown="is a view and its base or another view of its base has been modified inplace",
    ),
    # LinearWithFrozenWeight.backward returns None for the bias.
    "a frozen weight takes the bias's gradient": Finding(
        "Case('megatron_core.column_parallel_linear', ColumnConfig(frozen=True), world_size=1)",
        "parameter-gradient",
        "Expected bias.grad to be there",
        shown="bias.grad: expected [3.0], got None",
    ),
    "so the bias of attention's projection gets none where all weights are frozen": Finding(
        "Case('megatron_core.self_attention', AttentionConfig(head_dim=2, frozen=True), world_size=1)",
        "parameter-gradient",
        "Expected linear_qkv.bias.grad to be there",
        shown="linear_qkv.bias.grad: expected [0.0, 0.0, 0.0, 0.0, -6.0, 3.0], got None",
    ),
    # Column-parallel layers hand input and gradient to the collective as they are.
    "a strided input is gathered": Finding(
        "Case('megatron_core.column_parallel_linear', ColumnConfig(seq=2, in_features=2, out_features=2, bias=False, "
        "sequence_parallel=True), world_size=2, layout='sliced')",
        "buffers",
        "non-contiguous tensor at a collective",
    ),
    # _reduce reduced a contiguous copy, and returned the original.
    "a strided gradient is not reduced": Finding(
        "Case('megatron_core.mappings', RegionConfig(hidden=2), world_size=2, layout='sliced')",
        "input-gradient",
        "x.grad",
        shown="x.grad: expected [[[-3.0, 1.0]]], got [[[0.0, 0.0]]]",
        fixed="0.19.2",
        upstream="Megatron-LM commit 60f338a",
    ),
    # Reentrant checkpointing goes back only to inputs that need a gradient; the embedding that makes the layers' input is frozen.
    "recomputed layers get no gradient where the embedding is frozen": Finding(
        "Case('megatron_core.gpt_logits', GPTConfig(hidden=4, bias=False, head_dim=2, labels=False, frozen=True, recompute='full'), "
        "world_size=1)",
        "parameter-gradient",
        "Expected decoder.layers.0.input_layernorm.weight.grad to be there",
        shown="layers.0.input_layernorm.weight.grad: expected",
        upstream="Megatron-Bridge pull request 5586 works around it",
    ),
    # split_tensor_into_1d_equal_chunks keeps tensor.numel() // TP numbers on each rank, and drops the rest.
    "distributed saved activations must divide, and nobody says so": Finding(
        "Case('megatron_core.gpt_logits', GPTConfig(hidden=5, heads=2, groups=2, head_dim=2, ffn=2, labels=False, "
        "recompute='distributed'), world_size=2)",
        "execution",
        "raised RuntimeError",
        shown="shape '[1, 1, 5]' is invalid for input of size 4",
    ),
    # They are multiplied with the rank's tokens, to make up for a division by all tokens of the sequence.
    "with a loss per token, the losses on routing are divided by TP": Finding(
        "Case('megatron_core.moe', MoEConfig(seq=2, ffn=2, bias=False, sequence_parallel=True, experts=2, before=True, squares=0.25, "
        "per_token=True), world_size=2)",
        "parameter-gradient",
        "router.weight.grad",
        shown="router.weight.grad: expected",
        fixed="0.19.2",
        upstream="Megatron-LM issue 1652 and pull request 5047",
    ),
    # And those on each sequence's routing with the tokens of one sequence.
    "with a loss per token, the loss on each sequence's routing is divided by the batch": Finding(
        "Case('megatron_core.moe', MoEConfig(batch=2, bias=False, sequence_parallel=True, experts=2, before=True, "
        "balancing='seq_aux_loss', per_token=True), world_size=1)",
        "parameter-gradient",
        "router.weight.grad",
        shown="router.weight.grad: expected",
        fixed="0.19.2",
        upstream="Megatron-LM pull request 5798",
    ),
    # Both say .view where .reshape would do.
    "transposed logits are refused": Finding(
        "Case('megatron_core.vocab_parallel_cross_entropy', CrossEntropyConfig(seq=2, batch=2), world_size=1, layout='transposed')",
        "execution",
        "raised RuntimeError",
        shown="view size is not compatible",
    ),
    "a router refuses transposed tokens": Finding(
        "Case('megatron_core.moe', MoEConfig(seq=2, batch=2, bias=False, sequence_parallel=True, experts=2, before=True), "
        "world_size=1, layout='transposed')",
        "execution",
        "raised RuntimeError",
        shown="view size is not compatible",
    ),
    # _reduce works in place: on the input in forward, without mark_dirty, and on the incoming gradient in backward.
    "a reduction overwrites what it is given": Finding(
        "Case('megatron_core.branches', RegionConfig(mapping='reduce'), world_size=2)",
        "forward",
        "output[1]",
        shown="output[1]: expected [[[2.0]]], got [[[4.0]]]",
    ),
    "the backward of a copy overwrites the gradient of another branch": Finding(
        "Case('megatron_core.branches', RegionConfig(), world_size=2)",
        "input-gradient",
        "z.grad",
        shown="z.grad: expected [[[-3.0]]], got [[[-6.0]]]",
    ),
    # Queries are narrowed to the rank's own heads, gates were not.
    "gated attention cannot run where ranks share groups": Finding(
        "Case('megatron_core.gated_self_attention', AttentionConfig(heads=2, head_dim=2, causal=False, gate=True), world_size=2)",
        "execution",
        "raised RuntimeError",
        shown="shape '[1, 1, 2]' is invalid for input of size 4",
        fixed="0.19.2",
        upstream="Megatron-LM pull requests 3528 and 3575",
    ),
    # Every rank expands the rotary key to its own heads; the backward of the gather before that cuts, and sums nothing.
    "the rotary key of latent attention gets the gradient of the rank's own heads only": Finding(
        f"Case('megatron_core.latent_self_attention', {LATENT}), world_size=2)",
        "parameter-gradient",
        "linear_kv_down_proj.weight.grad",
        shown="linear_kv_down_proj.weight.grad: expected",
        upstream="Megatron-LM pull request 6839, without sequence parallelism",
    ),
    "also under sequence parallelism": Finding(
        f"Case('megatron_core.latent_self_attention', {LATENT}, sequence_parallel=True), world_size=2)",
        "parameter-gradient",
        "linear_kv_down_proj.weight.grad",
        shown="linear_kv_down_proj.weight.grad: expected",
    ),
    # finalize_model_grads sums whatever has q_layernorm in its name; this one's gradient is whole on every rank already.
    "the gradient of latent attention's query norm is multiplied by TP": Finding(
        f"Case('megatron_core.latent_self_attention', {LATENT}, query_rank=4, qk_norm=True), world_size=2)",
        "parameter-gradient",
        "q_layernorm.weight.grad",
        shown="q_layernorm.weight.grad: expected",
    ),
}

LOOKS_WRONG = {
    "scores are masked with -10000, not with minus infinity: its exponential is 0 next to any score there is": (
        "Case('megatron_core.self_attention', AttentionConfig(seq=3, head_dim=2), world_size=1)"
    ),
    "all layers gather into one global buffer: nobody looks at it after the product that it is for": (
        "Case('megatron_core.column_parallel_linear', ColumnConfig(seq=2, in_features=2, out_features=2, sequence_parallel=True), "
        "world_size=2, calls='interleaved')"
    ),
    "norms of queries and keys see the rank's own heads, and carry no flag: their gradients are summed by name": (
        "Case('megatron_core.self_attention', AttentionConfig(seq=2, heads=2, groups=2, head_dim=4, qk_norm=True), world_size=2)"
    ),
    "projections are cut through the middle of a group: with fewer groups than ranks they are gathered, and reduce-scattered back": (
        "Case('megatron_core.self_attention', AttentionConfig(seq=2, heads=4, head_dim=2), world_size=4)"
    ),
    "a column-parallel layer takes its input as it is, without copy_to_tensor_model_parallel_region: it sums in its own backward": (
        "Case('megatron_core.column_parallel_linear', ColumnConfig(in_features=2, out_features=2), world_size=2)"
    ),
    "an ignored target has a loss, and a gradient: the caller masks both": (
        "Case('megatron_core.vocab_parallel_cross_entropy', CrossEntropyConfig(seq=3, vocab=4, masked=True), world_size=2)"
    ),
    "learned positions carry no flag under sequence parallelism: they are added before the scatter, whose backward gathers": (
        "Case('megatron_core.gpt_logits', GPTConfig(seq=2, hidden=4, heads=2, groups=2, head_dim=2, ffn=2, labels=False, "
        "sequence_parallel=True), world_size=2)"
    ),
    "a tied head takes the embedding's weight as an argument, and neither copies nor reduces it: autograd adds up both uses": (
        "Case('megatron_core.gpt_logits', GPTConfig(seq=2, hidden=4, heads=2, groups=2, head_dim=2, ffn=2, labels=False), world_size=2)"
    ),
}
