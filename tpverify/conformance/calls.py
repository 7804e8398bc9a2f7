"""What a program can call: every collective of torch.distributed, in each of the ways in which it can be called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # functional collectives load it when first called: here, before processes are forked
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.nn.functional
from torch import Tensor

from tpverify.conformance.interpreter import Site, Waiting
from tpverify.conformance.tensors import pair_rows

functional: Any = torch.distributed._functional_collectives
differentiable: Any = torch.distributed.nn.functional
Calling = Callable[[Site], Waiting | None]


def _wait(site: Site, work: Any) -> Waiting | None:
    return None if work is None else work.wait


def _asynchronous(site: Site) -> bool:
    return site.step.wait_after is not None


def all_reduce(site: Site) -> Waiting | None:
    """In place."""
    x = site.read(site.shape)
    site.outputs = [x]
    return _wait(site, dist.all_reduce(x, site.op, site.group, _asynchronous(site)))


def all_reduce_coalesced(site: Site) -> Waiting | None:
    """Two tensors at once, in place."""
    site.outputs = [site.read(site.shape), site.read(site.rows(2), 1)]
    return _wait(site, dist.all_reduce_coalesced(site.outputs, site.op, site.group, _asynchronous(site)))


def broadcast(site: Site) -> Waiting | None:
    """In place, from the root."""
    x = site.read(site.shape)
    site.outputs = [x]
    return _wait(site, dist.broadcast(x, site.root_rank, site.group, _asynchronous(site)))


def reduce(site: Site) -> Waiting | None:
    """In place on the root; what other ranks' tensors hold afterwards is undefined."""
    x = site.read(site.shape)
    site.outputs = [x] if site.me == site.root else []
    return _wait(site, dist.reduce(x, site.root_rank, site.op, site.group, _asynchronous(site)))


def all_gather(site: Site) -> Waiting | None:
    """Into a list."""
    x = site.read(site.shape)
    site.outputs = site.listed([site.room(site.shape) for _ in site.members])
    return _wait(site, dist.all_gather(site.outputs, x, site.group, _asynchronous(site)))


def all_gather_into_tensor(site: Site) -> Waiting | None:
    """One below the other."""
    x = site.read(site.shape)
    site.outputs = [site.room(site.rows(site.size))]
    return _wait(site, dist.all_gather_into_tensor(site.outputs[0], x, site.group, _asynchronous(site)))


def all_gather_stacked(site: Site) -> Waiting | None:
    """Into a tensor with a dimension for ranks."""
    x = site.read(site.shape)
    site.outputs = [site.room((site.size, *site.shape))]
    return _wait(site, dist.all_gather_into_tensor(site.outputs[0], x, site.group, _asynchronous(site)))


def reduce_scatter(site: Site) -> Waiting | None:
    """Of a list."""
    parts = site.listed([site.read(site.shape, part) for part in range(site.size)])
    site.outputs = [site.room(site.shape)]
    return _wait(site, dist.reduce_scatter(site.outputs[0], parts, site.op, site.group, _asynchronous(site)))


def reduce_scatter_tensor(site: Site) -> Waiting | None:
    """Of one tensor."""
    x = site.read(site.rows(site.size))
    site.outputs = [site.room(site.shape)]
    return _wait(site, dist.reduce_scatter_tensor(site.outputs[0], x, site.op, site.group, _asynchronous(site)))


def gather(site: Site) -> Waiting | None:
    """To a list on the root."""
    x = site.read(site.shape)
    listing = (site.me == site.root or site.step.fault == "list everywhere") and site.step.fault != "no list"
    room = site.listed([site.room(site.shape) for _ in site.members]) if listing else None
    site.outputs = room or []
    return _wait(site, dist.gather(x, room, site.root_rank, site.group, _asynchronous(site)))


def scatter(site: Site) -> Waiting | None:
    """Of a list on the root."""
    listing = (site.me == site.root or site.step.fault == "list everywhere") and site.step.fault != "no list"
    parts = site.listed([site.read(site.shape, part) for part in range(site.size)]) if listing else None
    site.outputs = [site.room(site.shape)]
    return _wait(site, dist.scatter(site.outputs[0], parts, site.root_rank, site.group, _asynchronous(site)))


def all_to_all(site: Site) -> Waiting | None:
    """Of lists; blocks of two ranks may differ in size."""
    rows = _pairs(site) if site.step.splits else ([site.shape] * site.size,) * 2
    parts = site.listed([site.read(shape, part) for part, shape in enumerate(rows[0])])
    site.outputs = site.listed([site.room(shape) for shape in rows[1]])
    return _wait(site, dist.all_to_all(site.outputs, parts, site.group, _asynchronous(site)))


def _pairs(site: Site) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    sent = [(pair_rows(site.step, site.size, site.me, peer), *site.shape[1:]) for peer in range(site.size)]
    received = [(pair_rows(site.step, site.size, peer, site.me), *site.shape[1:]) for peer in range(site.size)]
    return sent, received


def _splits(site: Site) -> tuple[list[int] | None, list[int] | None, tuple[int, ...], tuple[int, ...]]:
    """Output and input split sizes, output and input shape."""
    if not site.step.splits:
        return None, None, site.rows(site.size), site.rows(site.size)
    sent, received = _pairs(site)
    into, out = [shape[0] for shape in received], [shape[0] for shape in sent]
    shapes = (sum(into), *site.shape[1:]), (sum(out), *site.shape[1:])
    if site.step.fault == "splits":
        into[0], out[0] = into[0] + 1, out[0] + 1
    if site.step.fault == "split count":
        into, out = [*into, 0], [*out, 0]
    return into, out, *shapes


def all_to_all_single(site: Site) -> Waiting | None:
    """Of one tensor, with or without split sizes."""
    into, out, output_shape, input_shape = _splits(site)
    x = site.read(input_shape)
    site.outputs = [site.room(output_shape)]
    return _wait(site, dist.all_to_all_single(site.outputs[0], x, into, out, site.group, _asynchronous(site)))


def barrier(site: Site) -> Waiting | None:
    """Nothing but waiting."""
    return _wait(site, dist.barrier(site.group, async_op=_asynchronous(site)))


# Every step's messages have a tag of their own: a rank that is ahead must not answer another step's recv from any.


def _ends(site: Site) -> tuple[int, int]:
    """Global ranks of who gets this rank's message, and of whose message it gets."""
    distance = 0 if site.step.fault == "self" else 1 + site.step.root % max(1, site.size - 1)
    return site.members[(site.me + distance) % site.size], site.members[(site.me - distance) % site.size]


def ring(site: Site) -> Waiting | None:
    """isend and irecv around the group."""
    if site.size == 1:
        return None
    to, source = _ends(site)
    site.outputs = [site.room(site.shape)]
    tag = site.index
    works = [dist.isend(site.read(site.shape), to, site.group, tag), dist.irecv(site.outputs[0], source, site.group, tag)]
    return lambda: [work.wait() for work in reversed(works) if work is not None]


def batch(site: Site) -> Waiting | None:
    """batch_isend_irecv around the group."""
    if site.size == 1:
        return None
    to, source = _ends(site)
    site.outputs = [site.room(site.shape)]
    operations = [
        dist.P2POp(dist.irecv, site.outputs[0], source, site.group, site.index),
        dist.P2POp(dist.isend, site.read(site.shape), to, site.group, site.index),
    ]
    works = dist.batch_isend_irecv(operations)
    return lambda: [work.wait() for work in works]


def send_recv(site: Site) -> Waiting | None:
    """Blocking messages from even group ranks to the next, with a tag, then back."""
    peer = site.me + 1 if site.me % 2 == 0 else site.me - 1
    if peer >= site.size:
        return None
    other, tag = site.members[peer if site.step.fault != "self" else site.me], site.index
    site.outputs = [site.room(site.shape)]
    x = site.read(site.shape)
    if site.me % 2 == 0:
        dist.send(x, other, site.group, tag)
        dist.recv(site.outputs[0], other, site.group, tag)
    else:
        dist.recv(site.outputs[0], other, site.group, tag)
        dist.send(x, other, site.group, tag)
    return None


def recv_from_any(site: Site) -> Waiting | None:
    """A message to group rank 0 from the last, taken from whoever sent."""
    if site.size > 1 and site.me == 0:
        site.outputs = [site.room(site.shape)]
        source = dist.recv(site.outputs[0], None, site.group, site.index)
        site.outputs.append(torch.tensor(source))
    elif site.size > 1 and site.me == site.size - 1:
        dist.send(site.read(site.shape), site.members[0], site.group, site.index)
    return None


def coalescing_manager(site: Site) -> Waiting | None:
    """Two all_reduces in one batch."""
    site.outputs = [site.read(site.shape), site.read(site.rows(2), 1)]
    manage: Any = getattr(dist, "_coalescing_manager")  # noqa: B009 - what c10d's stubs leave out
    with manage(site.group, async_ops=True) as manager:
        for output in site.outputs:
            dist.all_reduce(output, site.op, site.group)
    wait: Waiting = manager.wait
    return wait


def all_gather_object(site: Site) -> Waiting | None:
    """Of lists of numbers."""
    found: list[Any] = [None] * site.size
    dist.all_gather_object(found, site.read(site.shape).tolist(), site.group)
    site.outputs = [torch.tensor(item, dtype=site.dtype) for item in found]
    return None


def broadcast_object_list(site: Site) -> Waiting | None:
    """Of lists of numbers."""
    found = [site.read(site.shape).tolist(), site.me]
    dist.broadcast_object_list(found, site.root_rank, site.group)
    site.outputs = [torch.tensor(found[0], dtype=site.dtype), torch.tensor(found[1])]
    return None


def _functional(compute: Callable[[Site, Any], Tensor | list[Tensor]]) -> Calling:
    """A functional collective: its result is a promise, waited for when the step is due."""

    def call(site: Site) -> Waiting:
        promised = compute(site, site.group if site.group is not None else dist.group.WORLD)
        promises = promised if isinstance(promised, list) else [promised]

        def wait() -> None:
            site.outputs = [functional.wait_tensor(promise) for promise in promises]

        return wait

    return call


def _with_gradient(compute: Callable[[Site, Tensor, Any], Any], blocks: Callable[[Site], tuple[int, ...]]) -> Calling:
    """A differentiable collective: forward, and backward from a cotangent; the results and the input's gradient."""

    def call(site: Site) -> None:
        x = site.read(blocks(site)).detach().clone()
        x.requires_grad_(x.is_floating_point() or x.is_complex())
        outputs = compute(site, x, site.group if site.group is not None else dist.group.WORLD)
        results = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        site.outputs = [result.detach().clone() for result in results]
        if any(result.requires_grad for result in results):
            torch.autograd.backward(results, [site.cotangent(result) for result in results])
        if x.grad is not None:
            site.outputs.append(x.grad)

    return call


def _name(site: Site) -> str:
    return site.step.op.lower()


_one: Callable[[Site], tuple[int, ...]] = lambda site: site.shape  # noqa: E731
_all: Callable[[Site], tuple[int, ...]] = lambda site: site.rows(site.size)  # noqa: E731


def _functional_calls() -> dict[str, Calling]:
    return {
        "all_reduce": _functional(lambda s, g: functional.all_reduce(s.read(s.shape), _name(s), g)),
        "all_reduce_coalesced": _functional(
            lambda s, g: functional.all_reduce_coalesced([s.read(s.shape), s.read(s.rows(2), 1)], _name(s), g)
        ),
        "broadcast": _functional(lambda s, g: functional.broadcast(s.read(s.shape), s.root_rank, g)),
        "all_gather_tensor": _functional(lambda s, g: functional.all_gather_tensor(s.read(s.shape), 0, g)),
        "all_gather_last": _functional(lambda s, g: functional.all_gather_tensor(s.read(s.shape), len(s.shape) - 1, g)),
        "all_gather_into_tensor_coalesced": _functional(
            lambda s, g: functional.all_gather_into_tensor_coalesced([s.read(s.shape), s.read(s.rows(2), 1)], g)
        ),
        "reduce_scatter_tensor": _functional(lambda s, g: functional.reduce_scatter_tensor(s.read(s.rows(s.size)), _name(s), 0, g)),
        "reduce_scatter_tensor_coalesced": _functional(
            lambda s, g: functional.reduce_scatter_tensor_coalesced(
                [s.read(s.rows(s.size)), s.read(s.rows(2 * s.size), 1)], _name(s), [0, 0], g
            )
        ),
        "all_to_all_single": _functional(_functional_all_to_all),
    }


def _functional_all_to_all(site: Site, group: Any) -> Tensor:
    into, out, _, shape = _splits(site)
    result: Tensor = functional.all_to_all_single(site.read(shape), into, out, group)
    return result


def _differentiable_all_to_all(site: Site, x: Tensor, group: Any) -> Tensor:
    even = [site.shape[0] if site.shape else 1] * site.size
    into, out, _, _ = _splits(site)
    result: Tensor = functional.all_to_all_single_autograd(x, into or even, out or even, group)
    return result


def _autograd_calls() -> dict[str, Calling]:
    return {
        "all_reduce": _with_gradient(lambda s, x, g: functional.all_reduce(x, _name(s), g), _one),
        "all_gather_tensor": _with_gradient(lambda s, x, g: functional.all_gather_tensor_autograd(x, 0, g), _one),
        "reduce_scatter_tensor": _with_gradient(lambda s, x, g: functional.reduce_scatter_tensor_autograd(x, _name(s), 0, g), _all),
        "all_to_all_single": _with_gradient(_differentiable_all_to_all, lambda s: _splits(s)[3]),
    }


def _nn_calls() -> dict[str, Calling]:
    return {
        "all_reduce": _with_gradient(lambda s, x, g: differentiable.all_reduce(x, s.op, g), _one),
        "broadcast": _with_gradient(lambda s, x, g: differentiable.broadcast(x, s.root_rank, g), _one),
        "reduce": _with_gradient(_differentiable_reduce, _one),
        "all_gather": _with_gradient(lambda s, x, g: differentiable.all_gather(x, g), _one),
        "reduce_scatter": _with_gradient(
            lambda s, x, g: differentiable.reduce_scatter(s.room(s.shape), list(x.chunk(s.size)), s.op, g), _all
        ),
        "gather": _with_gradient(lambda s, x, g: differentiable.gather(x, s.root_rank, g), _one),
        "all_to_all_single": _with_gradient(lambda s, x, g: differentiable.all_to_all_single(torch.empty_like(x), x, group=g), _all),
    }


def _differentiable_reduce(site: Site, x: Tensor, group: Any) -> Tensor:
    """The root's result; what other ranks return is undefined, so it counts for nothing but its shape."""
    result: Tensor = differentiable.reduce(x, site.root_rank, site.op, group)
    return result if site.me == site.root else torch.where(torch.zeros_like(result, dtype=torch.bool), result, torch.zeros_like(result))


_PLAIN: tuple[Calling, ...] = (
    all_reduce,
    all_reduce_coalesced,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    all_gather_stacked,
    reduce_scatter,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    barrier,
    ring,
    batch,
    send_recv,
    recv_from_any,
    coalescing_manager,
    all_gather_object,
    broadcast_object_list,
)

CALLS: dict[str, Calling] = {
    **{getattr(call, "__name__", ""): call for call in _PLAIN},
    **{f"functional.{name}": call for name, call in _functional_calls().items()},
    **{f"autograd.{name}": call for name, call in _autograd_calls().items()},
    **{f"nn.{name}": call for name, call in _nn_calls().items()},
}
"""By name."""

warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
