"""tpverify: is it still the same model? Tensor-parallel code against its single-device reference, on simulated ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tpverify.case import Case as Case
    from tpverify.config import Config as Config
    from tpverify.config import configs as configs
    from tpverify.config import per_rank as per_rank
    from tpverify.current_group import tp_group as tp_group
    from tpverify.errors import CaseError as CaseError
    from tpverify.errors import CollectiveMismatch as CollectiveMismatch
    from tpverify.errors import Deadlock as Deadlock
    from tpverify.errors import RankError as RankError
    from tpverify.errors import RankTimeout as RankTimeout
    from tpverify.errors import SimulationError as SimulationError
    from tpverify.errors import SubjectError as SubjectError
    from tpverify.errors import TpverifyError as TpverifyError
    from tpverify.ledger.ledger import Ledger as Ledger
    from tpverify.ledger.record import Record as Record
    from tpverify.result import Result as Result
    from tpverify.sharding import Block as Block
    from tpverify.sharding import FusedShard as FusedShard
    from tpverify.sharding import PaddedShard as PaddedShard
    from tpverify.sharding import Partial as Partial
    from tpverify.sharding import Placement as Placement
    from tpverify.sharding import Replicate as Replicate
    from tpverify.sharding import Shard as Shard
    from tpverify.sharding import UnevenShard as UnevenShard
    from tpverify.simulator.world import Simulation as Simulation
    from tpverify.simulator.world import simulate as simulate
    from tpverify.subjects.subject import Collective as Collective
    from tpverify.subjects.subject import Input as Input
    from tpverify.subjects.subject import Subject as Subject
    from tpverify.subjects.subject import Vocabulary as Vocabulary
    from tpverify.verification import CheckFailed as CheckFailed
    from tpverify.verification import check_case as check_case
    from tpverify.verification import property_test as property_test
    from tpverify.verification import verify as verify
    from tpverify.violation import Violation as Violation

# Importing the package loads neither torch nor Hypothesis: each name is imported when it is first used.
_HOMES = {
    "tpverify.case": ("Case",),
    "tpverify.config": ("Config", "configs", "per_rank"),
    "tpverify.current_group": ("tp_group",),
    "tpverify.errors": (
        "CaseError",
        "CollectiveMismatch",
        "Deadlock",
        "RankError",
        "RankTimeout",
        "SimulationError",
        "SubjectError",
        "TpverifyError",
    ),
    "tpverify.ledger.ledger": ("Ledger",),
    "tpverify.ledger.record": ("Record",),
    "tpverify.result": ("Result",),
    "tpverify.sharding": ("Block", "FusedShard", "PaddedShard", "Partial", "Placement", "Replicate", "Shard", "UnevenShard"),
    "tpverify.simulator.world": ("Simulation", "simulate"),
    "tpverify.subjects.subject": ("Collective", "Input", "Subject", "Vocabulary"),
    "tpverify.verification": ("CheckFailed", "check_case", "property_test", "verify"),
    "tpverify.violation": ("Violation",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tpverify' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
