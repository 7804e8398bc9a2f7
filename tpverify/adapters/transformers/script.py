"""Source that builds and calls a decoder without tpverify, as :mod:`.models` does it in a run."""

from __future__ import annotations

import textwrap
from typing import Any

from tpverify.adapters.source import Expression, called, program, source_of
from tpverify.adapters.transformers.config import STORED, WITHOUT_LABELS, DecoderConfig, Family
from tpverify.adapters.transformers.models import SEED, distributed_options, held, implementations, pretrained_fields, restarted, whole

PROGRAM = """
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig{imports}
{definitions}

def build():
    {statements}
    return module
"""

DECODER = """class Decoder(torch.nn.Module):
    def __init__(self, causal_lm):
        super().__init__()
        self.causal_lm = causal_lm
{held}
    def forward(self, tokens, labels=None):
        {statements}
"""
HELD = '        self.held = held(causal_lm, "{call}")\n'
STORING = "import shutil\nfrom torch.distributed.tensor import DTensor"

MASK = "mask = torch.ones(tokens.shape[:2], dtype=torch.long)\nmask[0, {column}] = 0"
IN_TWO_STEPS = """first = self.causal_lm(input_ids=tokens[:, :-1]{first}, use_cache=True)
second = self.causal_lm(input_ids=tokens[:, -1:]{second}, cache=first.cache, use_cache=True)
return {{"logits": torch.cat([first.logits, second.logits], dim=1)}}"""
STATES = """found |= {f"state {index}": state for index, state in enumerate(output.hidden_states)}"""

OPTIONS: dict[str, dict[str, Any]] = {
    "items": {"num_items_in_batch": Expression("torch.tensor(3)")},
    "keep": {"logits_to_keep": 1},
    "states": {"output_hidden_states": True},
    "packed": {"position_ids": Expression("restarted(tokens)")},
}
"""Of a call, beside those that all have."""

SAVED = """torch.manual_seed({seed})
with tempfile.TemporaryDirectory() as folder:
    folders = [folder]
    dist.broadcast_object_list(folders)  # rank 0 alone saves
    AutoModelForCausalLM.from_config(config).save_pretrained(folders[0])
    dist.barrier()
    model = {loaded}
    dist.barrier()"""


def source(family: Family, config: DecoderConfig) -> str:
    """Source of ``build()``."""
    stored, packed = config.call in STORED, config.call == "packed"
    own = {"held": HELD.format(call=config.call) if stored else "", "statements": _indented(_forward(config), 8)}
    size = Expression("dist.get_world_size()")
    options = {"dtype": Expression("torch.get_default_dtype()"), **implementations(config), "distributed_config": Expression("plan")}
    loaded = called("AutoModelForCausalLM.from_pretrained", Expression("folders[0]"), **options)
    return program(
        PROGRAM,
        "config = " + called("AutoConfig.for_model", family.model_type, **pretrained_fields(family, config)),
        "plan = " + called("DistributedConfig", **distributed_options(config, size)),
        SAVED.format(seed=SEED, loaded=_indented(loaded, 4)),
        "model.activation_checkpointing_enable()" if config.mode == "checkpointing" else "",
        f"module = Decoder(model).{'train' if config.mode in ('train', 'checkpointing') else 'eval'}()",
        imports=STORING if stored else "",
        definitions=(source_of(whole, held) * stored, source_of(restarted) * packed, DECODER.format(**own)),
    )


def _indented(text: str, columns: int) -> str:
    return textwrap.indent(text, " " * columns).lstrip()


def _forward(config: DecoderConfig) -> str:
    """Statements of ``forward``."""
    body = _called(config)
    return f"with torch.no_grad():\n    {_indented(body, 4)}" if config.mode == "no_grad" else body


def _called(config: DecoderConfig) -> str:
    if config.call in STORED:
        return "return self.held"
    masked = config.mask != "none"
    mask = [MASK.format(column=0 if config.mask == "left" else -1)] if masked else []
    if config.call == "cached":
        first, second = (", attention_mask=mask[:, :-1]", ", attention_mask=mask") if masked else ("", "")
        return "\n".join([*mask, IN_TWO_STEPS.format(first=first, second=second)])
    labelled = config.call not in WITHOUT_LABELS
    options: dict[str, Any] = {
        "inputs_embeds" if config.call == "embeds" else "input_ids": Expression("tokens"),
        **({"attention_mask": Expression("mask")} if masked else {}),
        **({"labels": Expression("labels")} if labelled else {}),
        "use_cache": False,
        **OPTIONS.get(config.call, {}),
        **({"output_router_logits": True} if config.router_loss else {}),
    }
    found = ['"logits": output.logits', *['"loss": output.loss'] * labelled]
    found += ['"router_loss": getattr(output, "aux_loss", None)'] * config.router_loss
    output = "output = " + called("self.causal_lm", **options)
    returned = [f"return {{{', '.join(found)}}}"]
    if config.call == "states":
        returned = [f"found = {{{', '.join(found)}}}", STATES, "return found"]
    return "\n".join([*mask, output, *returned])
