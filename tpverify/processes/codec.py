"""How values travel between processes: as JSON and raw tensor bytes, decoded into a fixed set of classes; never as code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tpverify.ledger.record import CallSite, Record
from tpverify.run import ModuleCall, Placed, RankRun
from tpverify.sharding import Block, FusedShard, PaddedShard, Partial, Replicate, Shard, UnevenShard

_PLAIN = {cls.__name__: cls for cls in (Record, CallSite, RankRun, Placed, ModuleCall, Block, FusedShard, PaddedShard, UnevenShard)}
_DTENSOR: dict[str, Callable[..., Any]] = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""By name, as in ``str(dtype)``."""
_TAG = "!"
_LENGTH = 8


def encode(value: Any) -> bytes:
    """One message.

    Args:
        value: None, booleans, numbers, text, tuples, lists, dictionaries with text keys, tensors, and runs made of them.

    Raises:
        TypeError: anything else.
    """
    tensors: list[Tensor] = []
    tree = json.dumps(_flat(value, tensors), separators=(",", ":")).encode()
    return b"".join([len(tree).to_bytes(_LENGTH, "big"), tree, *(_content(tensor) for tensor in tensors)])


def decode(message: bytes) -> Any:
    """Read back :func:`encode`; tensors share no memory with each other.

    Raises:
        ValueError: the message is not of that form.
    """
    end = _LENGTH + int.from_bytes(message[:_LENGTH], "big")
    return _Reader(message, end).value(json.loads(message[_LENGTH:end]))


def _flat(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TAG: "tensor", "shape": list(value.shape), "dtype": str(value.dtype)}
    if type(value) is list:
        return [_flat(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_flat(item, tensors) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"Expected a dictionary with text keys but got {list(value)}")
        return {_TAG: "dict", "keys": list(value), "items": [_flat(item, tensors) for item in value.values()]}
    if isinstance(value, Shard):
        return {_TAG: "Shard", "items": [value.dim]}
    if isinstance(value, Replicate):
        return {_TAG: "Replicate", "items": []}
    if isinstance(value, Partial):
        return {_TAG: "Partial", "items": [value.reduce_op]}
    name = type(value).__name__
    if _PLAIN.get(name) is type(value):
        return {_TAG: name, "items": [_flat(getattr(value, field.name), tensors) for field in fields(value)]}
    raise TypeError(f"Expected plain data, tensors and runs but got {value!r} of type {name}")


def _content(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class _Reader:
    """Takes the tensors' bytes in the order in which they were written."""

    def __init__(self, message: bytes, start: int) -> None:
        self._message = message
        self._at = start

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        tag = tree[_TAG]
        if tag == "tensor":
            return self._tensor(tree["shape"], tree["dtype"])
        items = [self.value(item) for item in tree["items"]]
        if tag == "tuple":
            return tuple(items)
        if tag == "dict":
            return dict(zip(tree["keys"], items, strict=True))
        if tag in _DTENSOR:
            return _DTENSOR[tag](*items)
        if tag in _PLAIN:
            return _PLAIN[tag](*items)
        raise ValueError(f"Expected one of {', '.join([*_PLAIN, *_DTENSOR])} but got {tag!r}")

    def _tensor(self, shape: list[int], dtype: str) -> Tensor:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        size = tensor.numel() * tensor.element_size()
        part = bytearray(self._message[self._at : self._at + size])
        if len(part) != size:
            raise ValueError(f"Expected {size} bytes of a {dtype} tensor of shape {shape} but got {len(part)}")
        self._at += size
        return torch.frombuffer(part, dtype=tensor.dtype).reshape(shape) if size else tensor
