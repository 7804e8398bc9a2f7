"""Check ``vocabulary``: every id is owned once, others contribute exactly nothing, padding and ignored targets are inert."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch

from tpverify.case import call_label, without_call
from tpverify.checks.finding import Finding, bound_of
from tpverify.ledger.record import Record
from tpverify.run import Comparison, Placed
from tpverify.sharding import local_indices, owners, shard, sharded_dim
from tpverify.subjects.subject import Vocabulary
from tpverify.tolerance import row_errors

SHOWN = 5
"""How many ids a message lists."""


def vocabulary(comparison: Comparison) -> list[Finding] | None:
    """Lookups, losses and their gradients along a sharded vocabulary, id by id."""
    if comparison.subject.vocabulary is None or not comparison.parallel.ranks or not comparison.reference.ranks:
        return None
    described = comparison.subject.vocabulary(comparison.case.config)
    return [
        *_padding_gradients(comparison, described),
        *_contributions(comparison, described),
        *_ignored(comparison, described),
        *_wrong_ids(comparison, described),
    ]


def _parameters(comparison: Comparison, described: Vocabulary) -> list[str]:
    names = comparison.parallel.ranks[0].parameters
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in described.parameters)]


def _padding_gradients(comparison: Comparison, described: Vocabulary) -> list[Finding]:
    findings = []
    for name in _parameters(comparison, described):
        wrong = []
        for rank, run in enumerate(comparison.parallel.ranks):
            gradient = run.parameter_gradients[name]
            if gradient.local is None or sharded_dim(gradient.layout) != 0:
                continue
            indices = local_indices(described.size, gradient.layout, rank, comparison.case.world_size)
            padding = [position for position, index in enumerate(indices) if index < 0 and position < gradient.local.shape[0]]
            if padding and bool((gradient.local[padding] != 0).any()):
                wrong.append(rank)
        if wrong:
            message = f"Expected the padding rows of {name}.grad to be exactly zero but they are not"
            findings.append(Finding(tuple(wrong), f"{name}.grad", message))
    return findings


def _contributions(comparison: Comparison, described: Vocabulary) -> list[Finding]:
    """What each rank brings to the reduction of the first call's lookup: its own rows, and exact zeros for the ids of others."""
    names = _parameters(comparison, described)
    ids = comparison.reference.inputs.get(described.ids)
    if not described.lookup or ids is None or not names:
        return []
    layout = comparison.parallel.ranks[0].parameters[names[0]].layout
    if sharded_dim(layout) != 0 or comparison.case.world_size == 1:
        return []
    owner = owners(described.size, layout, comparison.case.world_size)
    table = comparison.reference.ranks[0].parameters[names[0]].local
    same_table = comparison.case.call_count == 1  # the first call's; between calls parameters change
    findings = []
    for rank, global_rank in enumerate(comparison.members):
        records = comparison.parallel.ledger.rank(global_rank).where(phase="forward", module=described.lookup)
        payloads = [record for record in records if record.payload and record.kind in ("all_reduce", "reduce_scatter")]
        if payloads and table is not None:
            text = _wrong_contribution(payloads[0], ids, table, owner, rank, same_table)
            if text:
                findings.append(Finding((rank,), described.ids, text))
    return findings


def _wrong_contribution(record: Record, ids: torch.Tensor, table: torch.Tensor, owner: list[list[int]], rank: int, same_table: bool) -> str:
    payload: torch.Tensor = record.payload[0]
    if payload.dim() < 1 or payload.shape[-1] == 0 or payload.numel() // payload.shape[-1] != ids.numel():
        return ""
    rows = payload.reshape(-1, payload.shape[-1])
    # Activations may be [batch, seq] or [seq, batch]: ids must fit in one of the two orders.
    orders = [ids.reshape(-1)] + ([ids.transpose(0, 1).reshape(-1)] if ids.dim() == 2 else [])
    texts = [_wrong_rows(rows, order, table, owner, rank, same_table) for order in orders]
    return "" if not all(texts) else texts[0 if payload.shape[:-1] == ids.shape else -1]


def _wrong_rows(rows: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, owner: list[list[int]], rank: int, same_table: bool) -> str:
    own = torch.tensor([rank in owner[identity] for identity in ids.tolist()], dtype=torch.bool)
    silent = rows[own].eq(0).all(-1) & table[ids[own]].ne(0).any(-1)
    foreign = rows[~own].ne(0).any(-1)
    texts = [_misread(rows[own], ids[own], table, rank)] if same_table and bool(own.any()) else []
    if bool(foreign.any()):
        texts.append(
            f"Expected rank {rank} to contribute exactly zero for ids of other ranks but it contributes to {_ids(ids[~own][foreign])}"
        )
    if bool(silent.any()):
        texts.append(f"Expected rank {rank} to contribute the rows of its own ids but it contributes nothing to {_ids(ids[own][silent])}")
    return "\n".join(filter(None, texts))


def _misread(rows: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, rank: int) -> str:
    """Ids for which the rows of others are brought, exactly."""
    wrong = [place for place in range(len(ids)) if not torch.equal(rows[place], table[ids[place]])]
    for place in wrong:
        held = [identity for identity in range(len(table)) if torch.equal(rows[place], table[identity]) and bool(rows[place].any())]
        if held:
            return (
                f"Expected rank {rank} to contribute the rows of its own ids but for id {int(ids[place])} it contributes the row of id"
                f" {held[0]}: shifted rows fit this"
            )
    return ""


def _ignored(comparison: Comparison, described: Vocabulary) -> list[Finding]:
    """Of every call."""
    calls = range(comparison.case.call_count)
    return [finding for call in calls for finding in _ignored_of(comparison, described, call)]


def _ignored_of(comparison: Comparison, described: Vocabulary, call: int) -> list[Finding]:
    targets = comparison.reference.inputs.get(call_label(described.targets, call))
    if described.ignore is None or targets is None or not described.logits:
        return []
    logits = call_label(described.logits, call)
    ignored = targets == described.ignore
    wrong = []
    for rank, run in enumerate(comparison.parallel.ranks):
        gradient = run.input_gradients.get(logits)
        if (
            gradient is not None
            and gradient.local is not None
            and gradient.local.shape[:-1] == ignored.shape
            and bool((gradient.local[ignored] != 0).any())
        ):
            wrong.append(rank)
    if not wrong:
        return []
    message = f"Expected ignored targets ({described.ignore}) to give their logits a gradient of exactly zero but they do not"
    return [Finding(tuple(wrong), f"{logits}.grad", message)]


def _wrong_ids(comparison: Comparison, described: Vocabulary) -> list[Finding]:
    """Outputs with one value or row per id that are wrong for some ids and right for all others; ignored targets tell nothing."""
    found: dict[tuple[str, str], list[int]] = {}
    sources = [
        (source, ignore, call)
        for source, ignore in ((described.ids, None), (described.targets, described.ignore))
        for call in range(comparison.case.call_count)
    ]
    for source, ignore, call in sources:
        ids = comparison.reference.inputs.get(call_label(source, call))
        if ids is None:
            continue
        for rank, run in enumerate(comparison.parallel.ranks):
            for label, placed in run.outputs.items():
                expected = comparison.reference.ranks[0].outputs.get(label)
                if expected is not None and expected.local is not None and label == call_label(without_call(label), call):
                    wrong = _depends_on_id(comparison, ids, ignore, expected.local, placed, rank)
                    if wrong:
                        found.setdefault((label, wrong), []).append(rank)
    return [
        Finding(tuple(ranks), label, f"Expected {label} to be right for every id but it is wrong for exactly {wrong}")
        for (label, wrong), ranks in found.items()
    ]


def _depends_on_id(comparison: Comparison, ids: torch.Tensor, ignore: int | None, expected: torch.Tensor, placed: Placed, rank: int) -> str:
    size = comparison.case.world_size
    local = placed.local
    wanted = shard(expected, placed.layout, rank, size)
    if local is None or local.shape != wanted.shape or wanted.shape[: ids.dim()] != ids.shape or not wanted.numel():
        return ""
    rows = (ids.numel(), max(1, wanted.numel() // ids.numel()))
    bad = row_errors(local.reshape(rows), wanted.reshape(rows)) > bound_of(comparison)
    flat = ids.reshape(-1)
    counted = torch.ones_like(flat, dtype=torch.bool) if ignore is None else flat != ignore
    wrong, right = set(flat[bad & counted].tolist()), set(flat[~bad & counted].tolist())
    return _ids(flat[bad & counted]) if wrong and right and not wrong & right else ""


def _ids(ids: torch.Tensor) -> str:
    unique = sorted(set(ids.tolist()))
    return "ids " + ", ".join(str(identity) for identity in unique[:SHOWN]) + (", ..." if len(unique) > SHOWN else "")
