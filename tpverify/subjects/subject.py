"""A subject: a reference module and its TP counterpart, with all the harness needs to compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpverify.errors import SubjectError
from tpverify.options import DTYPES
from tpverify.sharding import Placement, Replicate, as_placement

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from tpverify.sharding import PlacementLike

KINDS = ("normal", "integers")
PHASES = ("forward", "backward", "recompute", "optimizer", "other")


@dataclass(frozen=True)
class Input:
    """One input of a module: how its logical tensor is drawn and how ranks see it.

    Attributes:
        shape: logical shape, elements.
        kind: ``normal`` (floating point) or ``integers`` (ids in ``[low, high)``).
        low, high: range of ``integers``.
        ignore: an id that may also be drawn although it lies outside ``[low, high)`` (a loss's ``ignore_index``).
        placement: of the value, and of the gradient unless a :class:`Placement` names both.
        grad: whether the harness compares this input's gradient; None = floating-point inputs do.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    low: int = 0
    high: int = 0
    ignore: int | None = None
    placement: PlacementLike = Replicate()
    grad: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SubjectError(f"Expected kind to be one of {', '.join(KINDS)} but got kind={self.kind!r}")
        if self.kind == "integers" and self.high <= self.low:
            raise SubjectError(f"Expected low < high for integers but got low={self.low}, high={self.high}")
        if self.kind == "integers" and self.grad:
            raise SubjectError("Expected grad=False or None for an integer input but got grad=True")

    @property
    def placements(self) -> Placement:
        """Placement of the value and of the gradient."""
        return as_placement(self.placement)

    @property
    def requires_grad(self) -> bool:
        """Whether the tensor is a leaf that requires a gradient."""
        return self.kind == "normal" if self.grad is None else self.grad


@dataclass(frozen=True)
class Collective:
    """A collective that a subject expects in its ledger.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``all_to_all``, ...
        phase: ``forward``, ``backward``, ``recompute``, ``optimizer`` or ``other``.
        module: fnmatch pattern of the issuing module's path; the module under test itself has the path "".
        count: how many, on every rank.
        elements: size of each message in elements (the larger of input and output); None = any.
        reduce_op: ``SUM``, ``MAX``, ...; "" = any.
    """

    kind: str
    phase: str
    module: str = "*"
    count: int = 1
    elements: int | None = None
    reduce_op: str = ""

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise SubjectError(f"Expected phase to be one of {', '.join(PHASES)} but got phase={self.phase!r}")


@dataclass(frozen=True)
class Vocabulary:
    """What is cut along the vocabulary, for the ``vocabulary`` check.

    Attributes:
        size: logical number of ids.
        parameters: fnmatch patterns of the parameters whose dimension 0 runs over ids.
        ids: name of the integer input that holds the ids looked up, or "" if there is none.
        lookup: fnmatch pattern of the embedding module's path; its forward reduction is inspected, contribution by
            contribution. "" if there is no lookup.
        targets: name of the integer input that holds a loss's targets, or "".
        logits: name of the input that holds logits, vocabulary last, or "".
        ignore: the loss's ``ignore_index``, or None.
    """

    size: int
    parameters: tuple[str, ...] = ()
    ids: str = ""
    lookup: str = ""
    targets: str = ""
    logits: str = ""
    ignore: int | None = None

    def __post_init__(self) -> None:
        if not (self.parameters or self.ids or self.lookup or self.targets or self.logits):
            raise SubjectError(
                f"Expected a vocabulary to name parameters, ids, targets or logits but got Vocabulary(size={self.size}) only"
            )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A reference module and its TP counterpart.

    Attributes:
        name: built-in name; a user's subject is addressed as ``module:attribute``.
        reference: config -> module on one device.
        parallel: config -> module, called on every rank: the user's own code, unmodified. :func:`tpverify.tp_group` is its group.
        configs: strategy of frozen dataclasses of plain values, or a function of the world size that returns one.
        inputs: config -> ``{name: Input}``; passed to both modules by position, in this order.
        placements: ``{fnmatch pattern of a parallel parameter's name: placement}``, or a function of the config that
            returns it; the first pattern that matches decides. DTensor parameters need none.
        outputs: placement of the output, or of each output (tuple), or a function of the config that returns either.
        finalize_gradients: what the code under test does to its module after backward.
        communication: (config, world_size) -> the exact collectives of one forward and backward; None, of either = only recorded.
        rejects: (config, world_size) -> this case must be refused with a ``refusal``, not computed.
        vocabulary: config -> :class:`Vocabulary`; None = nothing is cut along a vocabulary.
        exact: whether all arithmetic is exact on small integers, so that results agree bitwise; a bool or config -> bool.
        subgroups: ``parallel`` honours :func:`tpverify.tp_group`, so two TP groups may share a world.
        rank_local: names of modules whose global variables belong to a rank (Megatron's ``parallel_state``).
        precision: narrowest dtype on the path; bounds the agreement that can be expected.
        dtypes: working dtypes in which both modules can run; cases are drawn in these only.
        refusal: the exception by which a rank refuses a case; other people's code may have its own.
        context: config -> context manager that surrounds all ranks of a run, for what a process has only once (``loss_parallel``).
        script: config -> Python source whose ``build()`` returns the parallel module on a rank of an initialised world, without
            tpverify, for ``tpverify replay --script``. It has ``torch`` and ``dist``, imports the rest, does what ``context`` does
            as far as real processes need it, and defines ``finalize_gradients(module)`` if the subject has one.
    """

    name: str
    reference: Callable[[Any], torch.nn.Module]
    parallel: Callable[[Any], torch.nn.Module]
    configs: SearchStrategy[Any] | Callable[[int], SearchStrategy[Any]]
    inputs: Callable[[Any], Mapping[str, Input]]
    placements: Mapping[str, PlacementLike] | Callable[[Any], Mapping[str, PlacementLike]] | None = None
    outputs: PlacementLike | tuple[PlacementLike, ...] | Callable[[Any], Any] = Replicate()
    finalize_gradients: Callable[[torch.nn.Module], None] | None = None
    communication: Callable[[Any, int], Sequence[Collective] | None] | None = None
    rejects: Callable[[Any, int], bool] | None = None
    vocabulary: Callable[[Any], Vocabulary] | None = None
    exact: bool | Callable[[Any], bool] = False
    subgroups: bool = False
    rank_local: tuple[str, ...] = ()
    precision: torch.dtype = torch.float64
    dtypes: tuple[str, ...] = DTYPES
    refusal: type[Exception] = ValueError
    context: Callable[[Any], AbstractContextManager[Any]] | None = None
    script: Callable[[Any], str] | None = None

    def placements_for(self, config: Any) -> dict[str, Placement]:
        """The parameter placements of one config, by pattern."""
        placements = self.placements(config) if callable(self.placements) else self.placements
        return {pattern: as_placement(placement) for pattern, placement in (placements or {}).items()}

    def outputs_for(self, config: Any) -> tuple[Placement, ...] | Placement:
        """The output placement(s) of one config."""
        outputs = self.outputs(config) if callable(self.outputs) else self.outputs
        return tuple(as_placement(output) for output in outputs) if isinstance(outputs, tuple) else as_placement(outputs)

    def working_dtype(self, asked: str) -> torch.dtype:
        """The dtype in which a case of ``Case.dtype`` ``asked`` runs: that one, or ``precision`` where it is the narrower."""
        dtype: torch.dtype = getattr(torch, asked)
        return max(dtype, self.precision, key=lambda each: torch.finfo(each).eps)

    def context_for(self, config: Any) -> AbstractContextManager[Any]:
        """What surrounds all ranks of a run in one process."""
        return nullcontext() if self.context is None else self.context(config)

    def exact_for(self, config: Any) -> bool:
        """Whether integer-valued runs of this config must agree bitwise."""
        return self.exact(config) if callable(self.exact) else self.exact
