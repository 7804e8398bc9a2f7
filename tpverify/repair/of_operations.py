"""Repairs of a rank's own operations: a product summed over ranks, a statistic of all their parts, no detached branch, no cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpverify.current_group import tp_group
from tpverify.repair.repair import Repair, Sites, at
from tpverify.simulator.recorder import call_sites

REDUCED = {"sum": 1, "mean": 1, "var": 1, "std": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "logsumexp": 1, "prod": 1, "norm": 2}
REDUCED |= {"vector_norm": 2, "linalg_vector_norm": 2, "linalg_norm": 2, "var_mean": 1, "std_mean": 1}
"""Statistics that come out without the dimension, by name: the position of the dimension among their arguments."""

KEPT = {"softmax": 1, "log_softmax": 1, "normalize": 2}
"""Functions that look along a dimension and keep it."""

NORMS = ("layer_norm", "rms_norm")
"""Functions over the last dimension that also take weights along it."""

CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
PURE = "the cast to"
"""Said of casts that do nothing else."""

PRODUCTS = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum")
"""What contracts a dimension that may be cut."""

STATISTIC, PRODUCT, DETACH, CAST = "statistic", "product", "detach", "cast"


@dataclass(frozen=True)
class Operation:
    """A place of the program that does something to a tensor.

    Attributes:
        kind: ``statistic``, ``product``, ``detach`` or ``cast``.
        name: of the function.
        sites: the frames of the call.
    """

    kind: str
    name: str
    sites: Sites

    @property
    def function(self) -> tuple[str, str]:
        """The function of the user's code that it stands in."""
        return self.sites[0].filename, self.sites[0].function


@dataclass
class Noticed:
    """The operations of a run that might be repaired, in the order in which they were first met."""

    operations: dict[Operation, None] = field(default_factory=dict)

    def around(self) -> TorchFunctionMode:
        """What surrounds each rank's program to collect them."""

        def notice(operation: Operation, call: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            self.operations[operation] = None
            return call()

        return _Mode(notice)


def of_operations(noticed: Noticed, kinds: Sequence[str]) -> Iterator[Repair]:
    """All repairs of the operations of one run.

    Args:
        kinds: those to consider.
    """
    operations = [operation for operation in noticed.operations if operation.kind in kinds]
    for operation in (each for each in operations if each.kind == CAST):
        yield _repair(f"without {operation.name}{at(operation.sites)}", "its rounding", {operation}, _uncast)
    for operation in (each for each in operations if each.kind == DETACH):
        yield _repair(f"without {operation.name}{at(operation.sites)}", "a detached branch", {operation}, _attached)
    for operation in (each for each in operations if each.kind == PRODUCT):
        place = f"{operation.name}{at(operation.sites)}"
        yield _repair(f"if {place} is summed over all ranks", "a missing all_reduce", {operation}, _summed)
        if DETACH in kinds:
            what = f"if the gradient of what {place} takes is summed over all ranks"
            yield _repair(what, "a missing all_reduce in backward", {operation}, _copied)
    statistics = [each for each in operations if each.kind == STATISTIC]
    for operation in statistics:
        where = f"if {operation.name}{at(operation.sites)} sees the parts of all ranks"
        yield _repair(where, "a local statistic", {operation}, _over_all_ranks)
        yield _repair(f"{where}, whose gradient is the same on each", "a local statistic", {operation}, _over_all_ranks_and_own_gradient)
    for operation in statistics if DETACH in kinds else ():
        what = f"if the gradient of what {operation.name}{at(operation.sites)} takes is summed over all ranks"
        yield _repair(what, "a missing all_reduce in backward", {operation}, _copied)
        yield _repair(f"if {operation.name}{at(operation.sites)} is detached", "a gradient that should stop there", {operation}, _detached)
    for function in dict.fromkeys(each.function for each in statistics):
        together = {each for each in statistics if each.function == function}
        if len(together) > 1:
            names = " and ".join(dict.fromkeys(each.name for each in together))
            where = f"if {names} in {function[1]} ({function[0]}) see the parts of all ranks"
            yield _repair(where, "a local statistic", together, _over_all_ranks)


def _repair(change: str, meaning: str, operations: set[Operation], substitute: Substitute) -> Repair:
    def handle(operation: Operation, call: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return substitute(operation, call, args, kwargs) if operation in operations else call()

    sites = next(iter(operations)).sites if len(operations) == 1 else ()
    return Repair(change, meaning, sites, around=lambda: _Mode(handle))


Substitute = Callable[[Operation, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Given an operation, the function and its arguments: what the program gets instead."""


class _Mode(TorchFunctionMode):
    """Sees the calls of the user's code that a repair may be about."""

    def __init__(self, handle: Substitute) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = _named(func, args, kwargs)
        if named is None:
            return func(*args, **kwargs)
        sites = call_sites()
        if not sites:
            return func(*args, **kwargs)
        return self._handle(Operation(*named, sites), lambda *new, **others: func(*(new or args), **{**kwargs, **others}), args, kwargs)


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The kind and the name of what a call does, or None if it is none of these."""
    name = getattr(func, "__name__", "")
    if name == "_set_grad_enabled":
        return (DETACH, "no_grad") if args and args[0] is False else None
    if name == "einsum":
        return PRODUCT, name
    if not args or not isinstance(args[0], Tensor) or isinstance(args[0], DTensor) or not args[0].is_floating_point():
        return None
    if name == "detach" or (name == "__get__" and getattr(func, "__self__", None) is Tensor.data):
        return DETACH, "detach" if name == "detach" else ".data"
    to = _cast_to(name, args, kwargs)
    if to is not None and to.is_floating_point and torch.finfo(to).eps > torch.finfo(args[0].dtype).eps:
        narrow = str(to).removeprefix("torch.")
        return CAST, f"{PURE} {narrow}" if name in ("to", "type", *CASTS) else f"dtype={narrow} of {name}"
    if name in PRODUCTS:
        return PRODUCT, name.strip("_")
    return (STATISTIC, name) if name in REDUCED or name in KEPT or name in NORMS else None


def _cast_to(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    if name in ("to", "type"):
        return next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.dtype)), None)
    dtype = kwargs.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else CASTS.get(name)


def _uncast(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if operation.name.startswith(PURE) else call(dtype=None)


def _attached(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return None if operation.name == "no_grad" else args[0]


def _summed(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The sum of the ranks' products; a bias is added to it once."""
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None) if operation.name == "linear" else None
    product = call() if bias is None else call(*args[:2], bias=None)
    total = _Sum.apply(product)  # type: ignore[no-untyped-call]
    return total if bias is None else total + bias


def _copied(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The product of the same, whose first factor gets the sum of the ranks' gradients."""
    first = next((place for place, arg in enumerate(args) if isinstance(arg, Tensor)), None)
    if first is None:
        return call()
    return call(*(_Copy.apply(arg) if place == first else arg for place, arg in enumerate(args)))  # type: ignore[no-untyped-call]


def _detached(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    result = call()
    return result.detach() if isinstance(result, Tensor) else tuple(part.detach() for part in result)


def _over_all_ranks(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _seeing_all(operation, call, args, kwargs, summed=True)


def _over_all_ranks_and_own_gradient(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _seeing_all(operation, call, args, kwargs, summed=False)


def _seeing_all(operation: Operation, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], summed: bool) -> Any:
    """The function of the ranks' parts, joined along the dimension that it looks along.

    Args:
        summed: whether the gradient of the joined tensor is the sum over ranks, or the same on each.
    """
    tensor: Tensor = args[0]
    name = operation.name
    if name in NORMS:
        return _norm(call, args, kwargs, summed)
    dim = _dim(name, args, kwargs)
    if dim is None:
        return call(_joined(tensor.reshape(-1), 0, summed), *args[1:])
    dim %= tensor.dim()
    result = call(_joined(tensor, dim, summed), *args[1:])
    if name in KEPT:
        start, length = _own(tensor.shape[dim])
        return result.narrow(dim, start, length)
    return result


def _norm(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], summed: bool) -> Any:
    """A normalisation over the last dimension, weights and all; every rank keeps its own part."""
    tensor: Tensor = args[0]
    whole = _joined(tensor, tensor.dim() - 1, summed)
    others = {key: _joined(value, 0, summed) if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    rest = [_joined(arg, 0, summed) if isinstance(arg, Tensor) else arg for arg in args[2:]]
    if "normalized_shape" in others:
        others["normalized_shape"] = whole.shape[-1:]
        result = call(whole, **others)
    else:
        result = call(whole, whole.shape[-1:], *rest, **others)
    return result.narrow(tensor.dim() - 1, *_own(tensor.shape[-1]))


def _dim(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The dimension along which a function looks; of several the last one; None = all."""
    position = {**REDUCED, **KEPT}[name]
    dim = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    if isinstance(dim, (tuple, list)):
        dim = max(dim, key=lambda each: each % args[0].dim()) if dim else None
    if name == "normalize" and dim is None:
        return 1
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None


def _lengths(length: int) -> list[int]:
    """How long every rank's part is."""
    group = tp_group()
    own = torch.tensor([length])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return [int(each) for each in gathered]


def _own(length: int) -> tuple[int, int]:
    """Where this rank's part begins in the whole, and how long it is."""
    before = _lengths(length)[: dist.get_rank(tp_group())]
    return sum(before), length


def _joined(tensor: Tensor, dim: int, summed: bool) -> Tensor:
    joined: Tensor = _Join.apply(tensor, dim, summed)  # type: ignore[no-untyped-call]
    return joined


class _Join(torch.autograd.Function):
    """All ranks' parts of a tensor along a dimension, on every rank; parts may differ in length."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, summed: bool) -> Tensor:
        group = tp_group()
        lengths = _lengths(tensor.shape[dim])
        ctx.dim, ctx.summed, ctx.start, ctx.length = dim, summed, sum(lengths[: dist.get_rank(group)]), tensor.shape[dim]
        padding = list(tensor.shape)
        padding[dim] = max(lengths) - tensor.shape[dim]
        padded = torch.cat([tensor.detach(), tensor.new_zeros(padding)], dim).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        if ctx.summed:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=tp_group())
        return gradient.narrow(ctx.dim, ctx.start, ctx.length), None, None


def _total(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp_group())
    return total


class _Sum(torch.autograd.Function):
    """The sum over ranks, all of which go on with it in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _total(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Copy(torch.autograd.Function):
    """The same on all ranks, which go on with it in different ways."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _total(gradients[0])
