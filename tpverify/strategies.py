"""Hypothesis strategies: the cases of a subject, and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException, InvalidArgument

from tpverify.case import Case
from tpverify.description import check_description
from tpverify.errors import CaseError, SubjectError
from tpverify.options import DTYPES, checked_dtypes
from tpverify.subjects.subject import Subject

DEFAULT_WORLD_SIZES = (1, 2, 3, 4)
ALL_WORLD_SIZES = (1, 2, 3, 4, 5, 6, 8)


def world_sizes(allowed: Sequence[int] = ALL_WORLD_SIZES) -> st.SearchStrategy[int]:
    """TP degrees; shrinks to the smallest."""
    sizes = tuple(allowed) if isinstance(allowed, Iterable) and not isinstance(allowed, str) else ()
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise CaseError(f"Expected one or more world sizes of at least 1, as in (1, 2, 4), but got world_sizes={allowed!r}")
    return st.sampled_from(sorted(set(sizes)))


def seeds() -> st.SearchStrategy[int]:
    """Seeds of tensors; shrinks to 0."""
    return st.integers(0, 2**32 - 1)


def layouts() -> st.SearchStrategy[str]:
    """Memory layouts of inputs and cotangents; contiguous in half of the draws."""
    return st.sampled_from(("contiguous", "contiguous", "contiguous", "transposed", "sliced", "expanded"))


def groups(subject: Subject, room: bool = True) -> st.SearchStrategy[str]:
    """Whether the TP group is the world or one of two that share it; one TP group in most draws, since two cost twice.

    Args:
        room: whether there are ranks enough for two.
    """
    if not (subject.subgroups and room):
        return st.just("world")
    return st.sampled_from(("world", "world", "world", "world", "world", "world", "blocks", "strided"))


def calls() -> st.SearchStrategy[str]:
    """How often the module is called; once in most draws, since two calls cost twice."""
    return st.sampled_from(("once", "once", "once", "once", "twice", "interleaved"))


def working_dtypes(subject: Subject, asked: Sequence[str]) -> tuple[str, ...]:
    """Of the dtypes asked for, those that the subject can run in.

    Raises:
        CaseError: there is none, or one is unknown.
    """
    names = checked_dtypes(asked)
    able = tuple(name for name in names if name in subject.dtypes)
    if not able:
        raise CaseError(f"Expected a dtype that {subject.name} can run in ({', '.join(subject.dtypes)}) but got dtypes={', '.join(names)}")
    return able


def tensor_values(subject: Subject, config: Any) -> st.SearchStrategy[str]:
    """How tensors are filled; only what makes a difference to the subject."""
    options = ["normal"]
    if subject.exact_for(config):
        options.append("integers")
    vocabulary = subject.vocabulary(config) if subject.vocabulary else None
    if vocabulary is not None:
        options += ["edges", "one_shard", "repeated"]
        if vocabulary.logits:
            options.append("spike")
    return st.sampled_from(options)


def configs_of(subject: Subject, world_size: int) -> st.SearchStrategy[Any]:
    """The subject's configs for one TP degree.

    Raises:
        SubjectError: ``configs`` is neither a strategy nor a function that returns one.
    """
    strategy = subject.configs if isinstance(subject.configs, st.SearchStrategy) else None
    if strategy is None and callable(subject.configs):
        strategy = subject.configs(world_size)
    if not isinstance(strategy, st.SearchStrategy):
        got = strategy if strategy is not None else subject.configs
        raise SubjectError(
            f"Expected configs to be a Hypothesis strategy, or a function of the world size that returns one, but got {got!r}"
        )
    return strategy


def cases(
    subject: Subject,
    allowed: Sequence[int] = DEFAULT_WORLD_SIZES,
    most_ranks: int | None = None,
    dtypes: Sequence[str] = DTYPES[:1],
) -> st.SearchStrategy[Case]:
    """Cases of a subject; shrink to one call of one TP group of the smallest TP degree, the simplest config, contiguous tensors, seed 0.

    Args:
        allowed: TP degrees.
        most_ranks: how many ranks there are for one TP group or two; None = any number.
        dtypes: working dtypes, of which those are drawn that the subject can run in.

    Raises:
        CaseError: ``allowed`` holds no world size, or something else; or the subject runs in none of the dtypes.
    """
    return _cases(subject, world_sizes(allowed), most_ranks, working_dtypes(subject, dtypes))


@st.composite
def _cases(draw: st.DrawFn, subject: Subject, sizes: st.SearchStrategy[int], most_ranks: int | None, dtypes: Sequence[str]) -> Case:
    world_size = draw(sizes)
    try:
        config = draw(configs_of(subject, world_size))
    except InvalidArgument as error:
        raise SubjectError(f"Expected configs of subject {subject.name} to be a valid strategy but Hypothesis says: {error}") from error
    except (HypothesisException, SubjectError):
        raise
    except (Exception, SystemExit) as error:
        got = f"{type(error).__name__}: {error}"
        raise SubjectError(f"Expected configs of subject {subject.name} to draw for world_size={world_size} but it raised {got}") from error
    check_description(subject, Case(subject.name, config, world_size))
    return Case(
        subject=subject.name,
        config=config,
        world_size=world_size,
        values=draw(tensor_values(subject, config)),
        layout=draw(layouts()),
        groups=draw(groups(subject, room=most_ranks is None or 2 * world_size <= most_ranks)),
        calls=draw(calls()),
        dtype=draw(st.sampled_from(dtypes)) if len(dtypes) > 1 else dtypes[0],
        seed=draw(seeds()),  # last: another seed is simpler than a second call
    )
