"""How torchtitan's Llama 3 comes to be on a rank, as its trainer makes and calls it, and how its parts are seen from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, compute_logprobs
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock

from tpverify.adapters.torchtitan.config import STORED, TOKENS, LlamaConfig
from tpverify.adapters.torchtitan.environment import Environment, local, whole
from tpverify.adapters.torchtitan.references import THETA, mode_of, positions_of, unscaled

CHECKPOINT = "_checkpoint_wrapped_module."
INITIAL = {"weight": nn.init.normal_}
"""Values that nobody should see: a case brings its own."""


def model_config(config: LlamaConfig) -> Any:
    """torchtitan's own config, with the attention that needs neither a mask nor a compiler."""
    norm = RMSNorm.Config(normalized_shape=config.hidden, param_init=INITIAL)
    rotary = ComplexRoPE.Config(dim=config.width, max_seq_len=16, theta=THETA, scaling="llama" if config.scaled_rotary else "none")

    def layer() -> Any:
        attention = make_gqa_config(
            dim=config.hidden,
            n_heads=config.heads,
            n_kv_heads=config.kv_heads,
            wqkv_param_init=INITIAL,
            wo_param_init=INITIAL,
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=config.fused,
            rope=rotary,
        )
        ffn = make_ffn_config(dim=config.hidden, hidden_dim=config.ffn, w1_param_init=INITIAL, w2w3_param_init=INITIAL)
        norms = {name: RMSNorm.Config(normalized_shape=config.hidden, param_init=INITIAL) for name in ("attention_norm", "ffn_norm")}
        return Llama3TransformerBlock.Config(attention=attention, feed_forward=ffn, **norms)

    return Llama3Model.Config(
        dim=config.hidden,
        vocab_size=config.vocab,
        enable_weight_tying=config.tied,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab, embedding_dim=config.hidden, param_init=INITIAL),
        norm=norm,
        lm_head=Linear.Config(in_features=config.hidden, out_features=config.vocab, param_init=INITIAL),
        layers=[layer() for _ in range(config.layers)],
    )


def build(backend: str, config: LlamaConfig) -> Decoder:
    """The model of a rank."""
    return Decoder(config, Environment(backend, config.sequence_parallel))


def _model(config: LlamaConfig, environment: Environment) -> Any:
    described = model_config(config)
    described.update_from_config(config=SimpleNamespace(parallelism=environment.parallelism))
    with torch.device("meta") if config.meta else contextlib.nullcontext():
        model = described.build()
    recompute = {"": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[config.recompute]
    if environment.backend == "spmd_types":
        # The released fully_shard, the last step of parallelize_llama, takes no plain tensors beside a TP axis.
        model.parallelize(environment.dims)
        if recompute is not None:
            recompute.build(dump_folder="").apply(model)
    else:
        model = parallelize_llama(
            model,
            parallel_dims=environment.dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=environment.parallelism,
            compile_config=CompileConfig(),
            ac_config=recompute,
            dump_folder="",
        )
    if config.meta:
        model.to_empty(device=torch.get_default_device())
    with torch.no_grad():
        model.init_weights()  # it also ties weights again, which have become two
    return model.train(config.mode == "train")


class Decoder(nn.Module):
    """The model, called as the trainer calls it.

    Its parameters are seen as the rank's own parts, without FSDP's axis, of one rank; their gradients are taken over after backward.
    """

    def __init__(self, config: LlamaConfig, environment: Environment) -> None:
        super().__init__()
        self.config, self.environment = config, environment
        self.model = _model(config, environment)
        with torch.device("meta"):
            alone = model_config(config).build()
        logical = {name: parameter.shape for name, parameter in alone.named_parameters(remove_duplicate=False)}
        held = dict(self.model.named_parameters(remove_duplicate=False))
        names = {name: name.replace(CHECKPOINT, "") for name in held}
        parts: dict[int, nn.Parameter] = {}
        for name, parameter in held.items():
            if id(parameter) not in parts:
                parts[id(parameter)] = nn.Parameter(_part(parameter.detach(), logical[names[name]]))
        self.parts = [(names[name], parts[id(parameter)], parameter) for name, parameter in held.items()]
        self.stored = ModelWrapper(self.model)
        self.loss = self._loss()

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The rank's parts, by the names of one device."""
        seen: set[int] = set()
        for name, part, _ in self.parts:
            if not (remove_duplicate and id(part) in seen):
                seen.add(id(part))
                yield prefix + name, part

    def _loss(self) -> Any:
        inner = CrossEntropyLoss.Config(global_vocab_size=self.config.vocab)
        if self.config.call != "chunked":
            return inner.build()
        wrapper: Any = ChunkedLossWrapper.Config(num_chunks=self.config.chunks, loss_fn=inner).build()
        wrapper.set_lm_head(self.model.lm_head)
        self.model._skip_lm_head = True
        return wrapper

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        """Ids and labels [b, s] -> the rank's logits [b, s, vocab], a loss [], log-probabilities and entropies [b, s], or parameters."""
        if self.config.call == STORED:
            return self._stored()
        positions = positions_of(self.config)
        others = {} if positions is None else {"positions": positions}
        inputs, targets, others = self.environment.given(ids, ids if labels is None else labels, **others)
        with mode_of(self.config):
            output = self._output(self.model(inputs, **others), targets, labels, others)
        if self.config.mode == "no_grad":  # after a step parameters are gathered anew; otherwise backward sees to that
            for layer in self.model.modules():
                if isinstance(layer, FSDPModule):
                    layer.reshard()
        return output

    def _output(self, output: Tensor, targets: Tensor, labels: Tensor | None, others: dict[str, Any]) -> Any:
        if labels is None:
            return local(output)
        if self.config.call == "logprobs":
            return compute_logprobs(output, labels, return_entropy=True)
        loss, _ = self.loss(output, targets, torch.tensor(TOKENS) if self.config.divided else None, **others)
        return unscaled(self.config, local(loss))

    def _stored(self) -> dict[str, dict[str, Tensor]]:
        held = self.stored.state_dict()
        saved = {name: whole(value) for name, value in held.items()}
        self.stored.load_state_dict({name: 2 * value for name, value in held.items()})
        loaded = {name: whole(parameter.detach()) for name, _, parameter in self.parts}
        self.stored.load_state_dict({name: value / 2 for name, value in self.stored.state_dict().items()})
        return {"saved": saved, "loaded": loaded}


def _part(tensor: Tensor, logical: torch.Size) -> Tensor:
    """What the rank should hold of a parameter, on what it holds: FSDP leaves an empty part no size at all, others may be too large."""
    part = local(tensor)
    if not part.numel() and isinstance(tensor, DTensor):
        cut: Any = tensor.placements[-1]
        return part.reshape([0 if dim == cut.dim else size for dim, size in enumerate(logical)])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dim, size in enumerate(logical):
        if part.shape[dim] != size:
            most = -(-size // ranks)
            part = part.narrow(dim, 0, max(0, min(most, size - most * rank)))
    return part


def finalize_gradients(module: nn.Module) -> None:
    """Sums the gradients of parameters whose type says that they are summands, as ``fully_shard`` does, and takes all of them over."""
    assert isinstance(module, Decoder)
    if module.environment.backend == "spmd_types" and module.environment.dims.tp_enabled:
        group = module.environment.dims.get_mesh("tp").get_group()
        for layer in module.model.modules():
            for name, layout in getattr(getattr(layer, "_sharding_config", None), "state_shardings", {}).items():
                gradient = getattr(getattr(layer, name, None), "grad", None)
                if gradient is not None and layout.per_axis_spmd_types()[parallel_dims.MeshAxisName.TP] is spmd_types.R:
                    dist.all_reduce(gradient, group=group)
    for _, part, parameter in module.parts:
        gradient = parameter.grad
        if gradient is not None:
            held = local(gradient)
            part.grad = held[tuple(map(slice, part.shape))] if held.numel() else held.reshape(part.shape)
