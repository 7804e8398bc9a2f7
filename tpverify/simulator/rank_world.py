"""PyTorch's registry of process groups, for one rank; and how all ranks come to the world's first group by one initialisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed.distributed_c10d as c10d

_MAPS = ("map", "names", "ranks", "backends", "tags", "to_tag")
_GROUP, _STORE = object(), object()
_KEY = "tpverify"


class RankWorld(c10d._World):
    """The groups that one rank knows."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, Any] = {name: {} for name in _MAPS}
        self._count = 0

    pg_map = property(lambda self: self._maps["map"])
    pg_names = property(lambda self: self._maps["names"])
    pg_group_ranks = property(lambda self: self._maps["ranks"])
    pg_backend_config = property(lambda self: self._maps["backends"])
    tags_to_pg = property(lambda self: self._maps["tags"])
    pg_to_tag = property(lambda self: self._maps["to_tag"])

    @property
    def group_count(self) -> int:
        """How many groups this rank has created or skipped; decides group names."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        """Set by c10d at every new group."""
        self._count = value

    def model(self, keys: dict[str, bytes]) -> Model:
        """What is known of the only group that there is.

        Args:
            keys: what is in the store that its own store writes to.
        """
        only: Any = self.default_pg
        _, store = self.pg_map[only]
        before = set(keys)
        store.set(_KEY, "")
        (key,) = set(keys) - before
        store.delete_key(_KEY)
        maps = _replaced(self._maps, {id(only): _GROUP, id(store): _STORE})
        return Model(only.group_name, only.group_desc, only.members, key.removesuffix(f"/{_KEY}"), maps, self._count)

    def follow(self, model: Model, group: Any, store: Any) -> None:
        """Know that of another group, and of its world's store."""
        prefixed = torch._C._distributed_c10d.PrefixStore(model.prefix, store)
        self._maps = _replaced(model.maps, {id(_GROUP): group, id(_STORE): prefixed})
        self._count = model.groups
        self.default_pg = group


class Model(NamedTuple):
    """A registry with one group; neither the group nor its store is in it, something stands in their places.

    Attributes:
        name, desc, members: the group's.
        prefix: of its keys in the world's store.
        maps, groups: the registry's, and how many groups there have been.
    """

    name: str
    desc: str
    members: tuple[int, ...]
    prefix: str
    maps: dict[str, Any]
    groups: int


def _replaced(value: Any, by_id: dict[int, Any]) -> Any:
    """The same containers anew, with other objects in the places of these."""
    if isinstance(value, dict):
        return {_replaced(key, by_id): _replaced(item, by_id) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, by_id) for item in value)
    return by_id.get(id(value), value)
