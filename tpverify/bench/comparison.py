"""The same work by all ways to run ranks: which of them is how far above the floor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpverify.bench.gloo import Pool, processes_anew, processes_kept
from tpverify.bench.local_tensor import local_tensors
from tpverify.bench.runners import Runner, floor, simulator
from tpverify.bench.threaded import threads_anew, threads_kept
from tpverify.bench.timing import Spread, in_turn, seconds
from tpverify.bench.work import Work
from tpverify.lookup import builtin_subjects
from tpverify.subjects.attention_subject import AttentionConfig
from tpverify.subjects.dtensor_mlp import DTensorMLPConfig
from tpverify.subjects.language_model import LanguageModelConfig
from tpverify.subjects.mlp import MLPConfig

FLOOR, SIMULATOR, NEW_PROCESSES = "floor", "simulator", "gloo processes, spawned"
SEQ, BATCH, HEADS, VOCAB = 16, 2, 8, 256

CONFIGS: Mapping[str, Callable[[int], Any]] = {
    "mlp": lambda hidden: MLPConfig(seq=SEQ, batch=BATCH, hidden=hidden, ffn=4 * hidden),
    "attention": lambda hidden: AttentionConfig(seq=SEQ, batch=BATCH, hidden=hidden, heads=HEADS, kv_heads=HEADS),
    "gpt": lambda hidden: LanguageModelConfig(
        seq=SEQ, batch=BATCH, hidden=hidden, heads=HEADS, kv_heads=HEADS, ffn=4 * hidden, layers=2, vocab=VOCAB, positions=SEQ, tied=True
    ),
    "dtensor_mlp": lambda hidden: DTensorMLPConfig(seq=SEQ, batch=BATCH, hidden=hidden, ffn=4 * hidden),
}
"""By built-in subject, its sizes for a hidden size: all of them divide by eight ranks."""


@dataclass(frozen=True)
class Row:
    """One way to run the ranks of one piece of work.

    Attributes:
        subject, world_size, hidden: what was run.
        runner: how.
        spread: seconds for all ranks once.
        ratio: median over the floor's median.
    """

    subject: str
    world_size: int
    hidden: int
    runner: str
    spread: Spread
    ratio: float

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data."""
        return {
            "subject": self.subject,
            "world_size": self.world_size,
            "hidden": self.hidden,
            "runner": self.runner,
            **self.spread.as_dict(),
            "ratio_to_floor": round(self.ratio, 3),
        }


def compare(
    subjects: Sequence[str], world_sizes: Sequence[int], hidden_sizes: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Time all ways to run ranks side by side.

    Processes are spawned for a call on the first piece of work of each world size only: what that takes hardly depends on the work.

    Args:
        rounds: samples of each.
        progress: told what comes next.
    """
    for world_size in world_sizes:
        spawned = False
        with Pool(world_size) as pool:
            for subject in subjects:
                for hidden in hidden_sizes:
                    progress(f"{subject}, {world_size} ranks, hidden {hidden}")
                    work = Work(builtin_subjects()[subject], CONFIGS[subject](hidden), world_size)
                    spreads = _spreads(work, runners_of(subject, pool), rounds)
                    if not spawned:
                        spreads[NEW_PROCESSES] = _spawned(work)
                        spawned = True
                    least = spreads[FLOOR].median
                    for runner, spread in spreads.items():
                        yield Row(subject, world_size, hidden, runner, spread, spread.median / least)


def runners_of(subject: str, pool: Pool) -> dict[str, Runner]:
    """The ways to run a subject's ranks, by name."""
    runners: dict[str, Runner] = {
        FLOOR: floor,
        SIMULATOR: simulator,
        "threaded group, kept": threads_kept,
        "threaded group, new": threads_anew,
        "gloo processes, kept": processes_kept(pool),
    }
    return runners | ({"LocalTensorMode": local_tensors} if subject.startswith("dtensor") else {})


def _spreads(work: Work, runners: Mapping[str, Runner], rounds: int) -> dict[str, Spread]:
    with contextlib.ExitStack() as stack:
        runs = {}
        for name, runner in runners.items():
            runs[name] = stack.enter_context(runner(work))
            if name != FLOOR:
                work.check(name, runs[name].results())
        return in_turn({name: run.once for name, run in runs.items()}, rounds)


def _spawned(work: Work) -> Spread:
    with processes_anew(work) as run:
        return Spread.of([seconds(run.once)])
