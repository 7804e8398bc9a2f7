"""Ready-made configs for subjects that need a few sizes only: no dataclass and no strategy of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tpverify.case import short_repr
from tpverify.errors import SubjectError


@dataclass(frozen=True, init=False, repr=False)
class Config:
    """A frozen set of named plain values: ``Config(batch=2, features=4).features == 4``."""

    _values: tuple[tuple[str, Any], ...]

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", tuple(values.items()))

    def __getattr__(self, name: str) -> Any:
        for known, value in self.__dict__.get("_values", ()):
            if known == name:
                return value
        raise AttributeError(f"Expected one of {', '.join(known for known, _ in self.__dict__.get('_values', ()))} but got {name!r}")

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={short_repr(value)}' for name, value in self._values)})"


def values_of(config: Any) -> dict[str, Any]:
    """By name, the values that a config is made of."""
    if isinstance(config, Config):
        return dict(config._values)
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}


def with_values(config: Any, changes: Mapping[str, Any]) -> Any:
    """The config with other values of some names."""
    if isinstance(config, Config):
        return Config(**{**values_of(config), **changes})
    return dataclasses.replace(config, **changes)


@dataclass(frozen=True)
class PerRank:
    """A size that is drawn per rank and multiplied by the world size."""

    smallest: int
    largest: int

    def of(self, world_size: int) -> st.SearchStrategy[int]:
        """The sizes for one TP degree."""
        return st.integers(self.smallest, self.largest).map(lambda size: size * world_size)


def per_rank(smallest: int, largest: int) -> PerRank:
    """For :func:`configs`: a multiple of the world size, with ``smallest`` to ``largest`` elements per rank.

    Raises:
        SubjectError: the range is empty or goes below 0.
    """
    if not 0 <= smallest <= largest:
        raise SubjectError(f"Expected 0 <= smallest <= largest but got smallest={smallest}, largest={largest}")
    return PerRank(smallest, largest)


def configs(**fields: Any) -> Callable[[int], st.SearchStrategy[Config]]:
    """``Subject.configs`` from named fields: Hypothesis strategies, :func:`per_rank` sizes, or constants.

    Raises:
        SubjectError: no field is given.
    """
    if not fields:
        raise SubjectError("Expected at least one field but got configs()")

    def of_world_size(world_size: int) -> st.SearchStrategy[Config]:
        return st.builds(Config, **{name: _strategy(field, world_size) for name, field in fields.items()})

    return of_world_size


def _strategy(field: Any, world_size: int) -> st.SearchStrategy[Any]:
    if isinstance(field, PerRank):
        return field.of(world_size)
    return field if isinstance(field, st.SearchStrategy) else st.just(field)
