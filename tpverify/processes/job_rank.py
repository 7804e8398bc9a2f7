"""Which process of a torchrun job this one is, from the environment that torchrun gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpverify.errors import CaseError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMMAND = "torchrun --nnodes N --nproc-per-node M -m tpverify.worker"


@dataclass(frozen=True)
class JobRank:
    """One process of the job.

    Attributes:
        rank, world_size: within the job.
        local_rank, local_world_size: within this process's machine.
        master: the host of rank 0, as the others call it.
        port: of the job's store on that host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: str
    port: int


def from_environment(environment: Mapping[str, str]) -> JobRank:
    """This process's place.

    Raises:
        CaseError: it is not part of a job, or of one that has been restarted.
    """
    missing = [name for name in VARIABLES if not environment.get(name)]
    if missing:
        got = "none of them" if len(missing) == len(VARIABLES) else f"no {', '.join(missing)}"
        raise CaseError(f"Expected {', '.join(VARIABLES)} in the environment but got {got}: start with {COMMAND}")
    numbers = {}
    for name in VARIABLES:
        if name != "MASTER_ADDR":
            if not environment[name].isdecimal():
                raise CaseError(f"Expected a number but got {name}={environment[name]!r}: start with {COMMAND}")
            numbers[name] = int(environment[name])
    restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0":
        raise CaseError(
            f"Expected the first start of a job but got TORCHELASTIC_RESTART_COUNT={restarts}: "
            "a verdict is not tried again, so run torchrun with --max-restarts 0"
        )
    return JobRank(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        numbers["LOCAL_WORLD_SIZE"],
        environment["MASTER_ADDR"],
        numbers["MASTER_PORT"],
    )
