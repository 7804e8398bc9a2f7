"""PyTorch's registry of process groups, for one rank; and how all ranks come to the world's first group by one initialisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d

_MAPS = ("map", "names", "ranks", "backends", "tags", "to_tag")


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

    def model(self) -> Model:
        """What is known of the only group that there is."""
        only: Any = self.default_pg
        maps = {name: _replaced(groups, only, Model) for name, groups in self._maps.items()}
        return Model(only.group_name, only.group_desc, only.members, maps, self._count)

    def follow(self, model: Model, group: Any) -> None:
        """Know that of another group."""
        self._maps = {name: _replaced(groups, Model, group) for name, groups in model.maps.items()}
        self._count = model.groups
        self.default_pg = group


class Model(NamedTuple):
    """A registry with one group, which is not in it: this class stands in its place.

    Attributes:
        name, desc, members: the group's.
        maps, groups: the registry's, and how many groups there have been.
    """

    name: str
    desc: str
    members: tuple[int, ...]
    maps: dict[str, Any]
    groups: int


def _replaced(value: Any, theirs: Any, own: Any) -> Any:
    """The same containers anew, with another group in them."""
    if isinstance(value, dict):
        return {_replaced(key, theirs, own): _replaced(item, theirs, own) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, theirs, own) for item in value)
    return own if value is theirs else value
