"""How PyTorch comes to talk to the simulator: what is registered with, and for a run changed in, torch.distributed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpverify.simulator.endpoint import Endpoint
from tpverify.simulator.process_group import SimProcessGroup
from tpverify.simulator.rank_world import Model, RankWorld
from tpverify.simulator.store import RankStore, SharedKeys
from tpverify.thread_state import thread_state

BACKEND = "sim"
_UNNAMED = (BACKEND, "undefined", "none", "")

_bindings: Any = torch._C._distributed_c10d


def current_endpoint() -> Endpoint | None:
    """The endpoint of the rank that runs on this thread, if any."""
    session = _session()
    return None if session is None else session.endpoint


class Rendezvous:
    """Where the ranks of one run initialise their worlds.

    Args:
        keys: behind the ranks' stores.
        world_size: number of ranks.

    Attributes:
        backend: what ``get_backend`` answers as long as the program has not named a backend.
    """

    backend = "gloo"

    def __init__(self, keys: SharedKeys, world_size: int) -> None:
        self.keys = keys
        self.world_size = world_size
        self._model: Model | None = None

    def store(self, rank: int) -> Any:
        """One rank's view of the world's store."""
        return RankStore(self.keys, rank)

    def model(self) -> Model | None:
        """What c10d knows when a rank has initialised its first world, which is the same on all ranks; once one has."""
        return self._model

    def learn(self, world: RankWorld) -> None:
        """A rank has initialised its first world through c10d."""
        self._model = world.model(self.keys.data)

    def group(self, endpoint: Endpoint, name: str, key: str, group_rank: int, members: tuple[int, ...]) -> SimProcessGroup:
        """One rank's view of a new group."""
        return SimProcessGroup(endpoint, name, key, group_rank, members)

    @contextlib.contextmanager
    def on_rank(self, endpoint: Endpoint) -> Iterator[None]:
        """Within the block this thread is the endpoint's rank and its world is initialised."""
        thread_state.session = session = _Session(self, endpoint)
        try:
            session.initialise()
            yield
        finally:
            if not endpoint.scheduler.abandoned(endpoint.rank):
                endpoint.discard()
                _bindings._unregister_all_process_groups()
            thread_state.session = None


class _Session:
    """One rank's worlds: the first is there from the start, others follow ``destroy_process_group``."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.worlds = 0
        self.claimed = False
        self.initialising = False
        self._rendezvous = rendezvous
        self._store = rendezvous.store(endpoint.rank)  # kept: c10d's C++ side does not keep the Python object

    def initialise(self) -> None:
        """Initialise the next world."""
        self.worlds += 1
        own: RankWorld = c10d._world  # type: ignore[assignment]
        model = self._rendezvous.model() if self.worlds == 1 else None
        if model is not None:
            self._follow(model, own)
            return
        self._initialise()
        if self.worlds == 1:
            self._rendezvous.learn(own)

    def _initialise(self) -> None:
        self.initialising = True
        store = _bindings.PrefixStore(f"world{self.worlds}", self._store)
        dist.init_process_group(BACKEND, store=store, rank=self.endpoint.rank, world_size=self._rendezvous.world_size)
        self.initialising = False

    def _follow(self, model: Model, own: RankWorld) -> None:
        """What c10d has done for the first, in a tenth of the time."""
        group = self.group(model.name, self.endpoint.rank, model.members)
        group._set_group_name(model.name)
        group._set_group_desc(model.desc)
        own.follow(model, group, self._store)
        _bindings._register_process_group(model.name, group)

    def named(self, backend: Any) -> str:
        """What ``get_backend`` answers for a group: what the program asked for."""
        name = str(backend).lower()
        return self._rendezvous.backend if name in _UNNAMED else name

    def claim(self, arguments: dict[str, Any]) -> None:
        """The rank's program calls ``init_process_group``: the first time in a world, it is as if it had made it.

        Raises:
            ValueError: the world is initialised twice, or as another rank or size than this one.
        """
        for name, own in (("rank", self.endpoint.rank), ("world_size", self._rendezvous.world_size)):
            given = arguments.get(name)
            if given not in (None, -1, own):
                raise ValueError(f"Expected init_process_group with {name}={own} on this rank but got {name}={given}")
        if c10d._world.default_pg is None:
            self.initialise()
        elif self.claimed:
            raise ValueError("Expected one init_process_group per world but got a second: call destroy_process_group first")
        self.claimed = True
        _name_backend(c10d._world.default_pg, self.named(arguments.get("backend")))

    def key(self, group_name: str) -> str:
        """A group's name that is unique in the run."""
        return f"{self.worlds}/{group_name}"

    def group(self, name: str, group_rank: int, members: tuple[int, ...]) -> SimProcessGroup:
        """This rank's view of a new group."""
        return self._rendezvous.group(self.endpoint, name, self.key(name), group_rank, members)


def _session() -> _Session | None:
    session: _Session | None = thread_state.session
    return session


def _name_backend(group: Any, name: str) -> None:
    groups: Any = c10d._world.pg_map
    groups[group] = (name, groups[group][1])


def _create_group(options: Any, backend_options: Any) -> SimProcessGroup:
    """c10d's hook: build one rank's view of a new group."""
    session = _session()
    if session is None:
        raise RuntimeError(f"Expected backend={BACKEND!r} on a simulated rank only but no rank runs on this thread")
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return session.group(options.group_id, options.group_rank, members)


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"])
_SIMULATED = dist.Backend(BACKEND)

# DTensor asks for this. A CUDA build of torch 2.11 on a machine without a GPU crashes unless a thread that lives on asks first.
if not torch.cuda.is_available() and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
    torch._C._ensureCUDADeviceGuardSet()


@contextlib.contextmanager
def simulated_c10d() -> Iterator[None]:
    """Within the block every backend means the simulator on ranks; other threads are not concerned."""
    # The mode cannot be read. Torch's threaded process group is its only other user, and replaces the world as we do.
    isolated = type(c10d._world) is not c10d._World
    _bindings._set_thread_isolation_mode(True)
    try:
        with initialisation_undone(), warnings.catch_warnings(), _every_backend_simulated(), _initialised_once():
            warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl backend")
            yield
    finally:
        _bindings._set_thread_isolation_mode(isolated)


@contextlib.contextmanager
def initialisation_undone() -> Iterator[None]:
    """After the block all is as before that ``init_process_group`` leaves in the process: what it was told, and a hook for exceptions."""
    before = {name: getattr(c10d, name, None) for name in ("_backend", "_default_pg_init_method")}
    excepthook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = excepthook
        vars(c10d).update(before)


@contextlib.contextmanager
def _every_backend_simulated() -> Iterator[None]:
    helper: Any = c10d._new_process_group_helper
    names = list(_signature(helper).parameters)

    def create(*args: Any, **kwargs: Any) -> Any:
        session = _session()
        if session is None:
            return helper(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        members = tuple(given["global_ranks_in_group"])
        if members:
            session.endpoint.exchange.declare(session.key(given["group_name"]), members, session.endpoint.rank)
        asked = session.named(given["backend"])
        created = helper(**(given | {"backend": _SIMULATED}))
        if c10d._world.pg_map.get(created[0], (None,))[0] == BACKEND:  # not a group that was there already
            _name_backend(created[0], asked)
        return created

    setattr(c10d, helper.__name__, create)
    try:
        yield
    finally:
        setattr(c10d, helper.__name__, helper)


@contextlib.contextmanager
def _initialised_once() -> Iterator[None]:
    """``init_process_group`` on a rank claims the world that is already there, whoever imported it under what name."""
    public: Any = dist.init_process_group
    signature = _signature(public)
    cell = _wrapped(public)
    original: Callable[..., Any] = cell.cell_contents

    def initialise(*args: Any, **kwargs: Any) -> Any:
        session = _session()
        if session is None or session.initialising:
            return original(*args, **kwargs)
        session.claim(signature.bind(*args, **kwargs).arguments)
        return None

    initialise.__name__ = original.__name__
    cell.cell_contents = initialise
    try:
        yield
    finally:
        cell.cell_contents = original


@functools.lru_cache(maxsize=4)
def _signature(function: Any) -> inspect.Signature:
    """Of a function of c10d's, which takes longer to find than a small run does."""
    return inspect.signature(function)


def _wrapped(function: Any) -> CellType:
    """The cell in which a decorated function keeps what it wraps."""
    for cell in function.__closure__ or ():
        if callable(cell.cell_contents):
            found: CellType = cell
            return found
    raise RuntimeError(f"Expected {function.__qualname__} to be decorated, as in torch 2.11 to 2.14, but found no wrapped function")
