"""megatron-core's mixture of experts, each expert cut over the ranks, beside one where every token passes every expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from tpverify.adapters.megatron_core.environment import COMMON, along_sequence, begin, finalize_gradients, transformer_config
from tpverify.adapters.megatron_core.mlp import ACTIVATIONS, mlp_fields, mlp_placements
from tpverify.adapters.megatron_core.references import MLPConfig, ReferenceMLP
from tpverify.adapters.megatron_core.script import ACTIVATION, CONFIG, config_source, script
from tpverify.sharding import PlacementLike, Replicate
from tpverify.subjects.drawing import activations, divisible
from tpverify.subjects.subject import Input, Subject

BALANCING = ("none", "aux_loss", "seq_aux_loss")


@dataclass(frozen=True, kw_only=True)
class MoEConfig(MLPConfig):
    """Sizes, elements, and options of a mixture of experts over [seq, batch, hidden].

    Attributes:
        experts, chosen: how many there are, and by how many each token passes.
        score: of the experts that were chosen, ``softmax`` or ``sigmoid``; before: softmax is taken over all of them.
        shared, shared_gate: width of an expert for all tokens, or 0; whether it has a gate.
        balancing: a loss on the tokens of each expert, whose gradient is added in backward.
        squares: coefficient of a loss on the squared logarithm of the scores' sum, or None.
        per_token: the program sums its loss over tokens, and divides all gradients by their number later.
    """

    experts: int = 1
    chosen: int = 1
    score: str = "softmax"
    before: bool = False
    shared: int = 0
    shared_gate: bool = False
    balancing: str = "none"
    squares: float | None = None
    per_token: bool = False


COEFFICIENT = 0.5
"""Of the balancing loss."""


@st.composite
def moe_configs(draw: st.DrawFn, world_size: int) -> MoEConfig:
    """All options; Megatron trains on several ranks with sequence parallelism only."""
    seq, batch, flaw = draw(activations(world_size, True, ("ffn",)))
    experts = draw(st.integers(2, 4))
    shared = draw(st.sampled_from([0, 1, 2])) * world_size
    chosen = draw(st.integers(1, experts))
    return MoEConfig(
        seq=seq,
        batch=batch,
        hidden=draw(st.integers(1, 6)),
        ffn=draw(divisible(world_size, flaw != "")),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        gated=draw(st.booleans()),
        bias=False,
        sequence_parallel=True,
        experts=experts,
        chosen=chosen,
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        before=chosen == 1 or draw(st.booleans()),  # Megatron refuses a softmax over one score
        shared=shared,
        shared_gate=shared > 0 and draw(st.booleans()),
        balancing=draw(st.sampled_from(BALANCING)),
        squares=draw(st.sampled_from([None, 0.25])),
        per_token=draw(st.booleans()),
    )


class _Router(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))


class _Experts(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(ReferenceMLP(config) for _ in range(config.experts))


class _SharedExpert(ReferenceMLP):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__(MLPConfig(hidden=config.hidden, ffn=config.shared, activation=config.activation, gated=config.gated, bias=False))
        if config.shared_gate:
            self.gate_weight = nn.Parameter(torch.empty(1, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)[0]
        return output * torch.sigmoid(F.linear(x, self.gate_weight)) if hasattr(self, "gate_weight") else output


class _Injected(torch.autograd.Function):
    """The first argument as it is; backward begins at the second too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_ones(())


class ReferenceMoE(nn.Module):
    """The sum over all experts, each weighted with its probability, which is 0 unless it was chosen."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router, self.experts = _Router(config), _Experts(config)
        if config.shared:
            self.shared_experts = _SharedExpert(config)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, hidden] -> the same."""
        logits = F.linear(x, self.router.weight)
        if self.config.squares is not None:
            logits = self._with(logits, self.config.squares * logits.logsumexp(-1).square().mean())
        weights = self._weights(logits)
        if self.config.balancing != "none":
            weights = self._with(weights, self._balancing_loss(logits))
        parts = [weights[..., index, None] * expert(x)[0] for index, expert in enumerate(self.experts.local_experts)]
        output = torch.stack(parts).sum(0)
        return output + self.shared_experts(x) if self.config.shared else output

    def _with(self, x: Tensor, loss: Tensor) -> Tensor:
        tokens = self.config.seq * self.config.batch if self.config.per_token else 1
        injected: Tensor = _Injected.apply(x, loss * tokens)  # type: ignore[no-untyped-call]
        return injected

    def _weights(self, logits: Tensor) -> Tensor:
        """[s, b, experts]."""
        config = self.config
        scores = logits.softmax(-1) if config.score == "softmax" and config.before else logits
        scores = scores.sigmoid() if config.score == "sigmoid" else scores
        best, index = scores.topk(config.chosen, dim=-1)
        if config.score == "sigmoid":
            best = best / best.sum(-1, keepdim=True) if config.chosen > 1 else best
        elif not config.before:
            best = best.softmax(-1)
        return torch.zeros_like(logits).scatter(-1, index, best)

    def _balancing_loss(self, logits: Tensor) -> Tensor:
        """experts * sum over experts of (share of the tokens) * (mean score), over all tokens or the mean over sequences."""
        config = self.config
        scores = logits.softmax(-1)
        if config.score == "sigmoid":
            scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        chosen = torch.zeros_like(logits).scatter(-1, scores.topk(config.chosen, dim=-1).indices, 1.0)
        dims = (0, 1) if config.balancing == "aux_loss" else (0,)
        share, mean = chosen.mean(dims) / config.chosen, scores.mean(dims)
        return COEFFICIENT * config.experts * (share * mean).sum(-1).mean()


def _parallel(config: MoEConfig) -> nn.Module:
    begin()
    megatron = transformer_config(True, **_fields(config))
    mlp: Any = get_gpt_layer_local_spec(num_experts=config.experts, moe_grouped_gemm=False).submodules.mlp
    # Later versions bind the submodules to a function.
    submodules = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
    module: nn.Module = MoELayer(megatron, submodules)
    return module


def _fields(config: MoEConfig) -> dict[str, Any]:
    """Of a ``TransformerConfig``."""
    return {
        "hidden_size": config.hidden,
        "kv_channels": 1,
        "num_moe_experts": config.experts,
        "moe_ffn_hidden_size": config.ffn,
        "moe_router_topk": config.chosen,
        "moe_router_score_function": config.score,
        "moe_router_pre_softmax": config.before,
        "moe_router_load_balancing_type": config.balancing,
        "moe_aux_loss_coeff": 0.0 if config.balancing == "none" else COEFFICIENT,
        "moe_z_loss_coeff": config.squares,
        "moe_shared_expert_intermediate_size": config.shared or None,
        "moe_shared_expert_gate": config.shared_gate,
        "moe_token_dispatcher_type": "allgather",
        "calculate_per_token_loss": config.per_token,
        **mlp_fields(config),
    }


IMPORTS = """from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
"""


def _source(config: MoEConfig) -> str:
    return script(
        "moe_utils.te_general_gemm = None  # 0.16.1 has no such name without Transformer Engine",
        config_source(True, **_fields(config)),
        f"mlp = get_gpt_layer_local_spec(num_experts={config.experts}, moe_grouped_gemm=False).submodules.mlp",
        'module = MoELayer(config, mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"])',
        imports=ACTIVATION * (config.activation == "quick_gelu") + IMPORTS + CONFIG,
    )


def moe_placements(config: MoEConfig) -> dict[str, PlacementLike]:
    """Of all parameters."""
    shared: dict[str, PlacementLike] = {}
    if config.shared:
        mlp = mlp_placements(MLPConfig(ffn=config.shared, gated=config.gated))
        shared = {f"shared_experts.{name.lstrip('*')}": placement for name, placement in mlp.items()}
        if config.shared_gate:
            shared["*gate_weight"] = Replicate()
    return {"router.*": Replicate(), **shared, **{f"experts{name}": placement for name, placement in mlp_placements(config).items()}}


SUBJECTS = {
    "moe": Subject(
        name="megatron_core.moe",
        reference=ReferenceMoE,
        parallel=_parallel,
        configs=moe_configs,
        inputs=lambda c: {"x": Input((c.seq, c.batch, c.hidden), placement=along_sequence(True))},
        placements=moe_placements,
        outputs=along_sequence(True),
        finalize_gradients=finalize_gradients,
        rejects=lambda c, world_size: c.ffn % world_size != 0,
        refusal=AssertionError,
        precision=torch.float32,  # scores are computed in it
        script=_source,
        **COMMON,
    ),
}
