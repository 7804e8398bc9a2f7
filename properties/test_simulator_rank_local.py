"""Containers, class attributes and caches of the modules that a program names belong to a rank."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tpverify.simulator.world import simulate

MODULE = "tpverify_rank_local_classes"
STATEFUL = """
import functools
from collections import OrderedDict, defaultdict, deque

class Registry(dict):
    pass

ORDERED, LISTS, QUEUE, REGISTRY = OrderedDict(), defaultdict(list), deque(maxlen=2), Registry(nested=[])

class Holder:
    rank = None
    seen = []

    class Inner:
        rank = None

    def method(self):
        return self.rank

    @classmethod
    @functools.lru_cache(maxsize=None)
    def cached(cls, ask):
        return ask()

@functools.lru_cache(maxsize=3, typed=True)
def first(ask):
    return ask()

ALIAS = first
"""


def run(program: Callable[[int], Any], **options: Any) -> list[Any]:
    return simulate(lambda: program(dist.get_rank()), 3, **options).results


@pytest.fixture
def stateful() -> Iterator[types.ModuleType]:
    module = types.ModuleType(MODULE)
    exec(STATEFUL, vars(module))
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def remember(module: types.ModuleType, rank: int) -> list[Any]:
    """What a rank finds in the module after every rank has put itself where nobody was before."""
    module.ORDERED.setdefault("rank", rank)
    module.LISTS["ranks"].append(rank)
    module.QUEUE.append(rank)
    module.REGISTRY["nested"].append(rank)
    holder = module.Holder
    holder.rank = rank if holder.rank is None else holder.rank
    holder.Inner.rank = rank if holder.Inner.rank is None else holder.Inner.rank
    holder.seen.append(rank)
    module.first(dist.get_rank), holder.cached(dist.get_rank)
    dist.barrier()
    kept = [module.ORDERED["rank"], *module.LISTS["ranks"], *module.QUEUE, *module.REGISTRY["nested"]]
    return [*kept, holder().method(), holder.Inner.rank, *holder.seen, module.ALIAS(dist.get_rank), holder.cached(dist.get_rank)]


def test_containers_class_attributes_and_caches_of_named_modules_are_the_ranks_own(stateful: types.ModuleType) -> None:
    def program(rank: int) -> list[Any]:
        assert (type(stateful.QUEUE), stateful.QUEUE.maxlen) == (type(queue), 2)
        assert stateful.LISTS.default_factory is list and type(stateful.REGISTRY) is type(registry)
        assert stateful.first.cache_parameters() == {"maxsize": 3, "typed": True} and stateful.ALIAS is stateful.first
        return remember(stateful, rank)

    queue, registry, first, seen = stateful.QUEUE, stateful.REGISTRY, stateful.first, stateful.Holder.seen
    assert run(program, rank_local=[MODULE]) == [[rank] * 9 for rank in range(3)]
    assert stateful.first is first and first.cache_info().currsize == 0
    assert stateful.QUEUE is queue and stateful.Holder.seen is seen
    assert (list(queue), seen, registry, stateful.ORDERED, stateful.LISTS) == ([], [], {"nested": []}, {}, {})
    assert stateful.Holder.rank is None and stateful.Holder.Inner.rank is None


def test_containers_class_attributes_and_caches_of_other_modules_are_shared(stateful: types.ModuleType) -> None:
    found = run(lambda rank: remember(stateful, rank))
    assert found[0] == found[1] == found[2] != [0] * 9
