"""Which libraries there are adapters for, what each needs, and whether it is installed here."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpverify.errors import CaseError

if TYPE_CHECKING:
    from tpverify.subjects.subject import Subject


@dataclass(frozen=True)
class Library:
    """A library whose released code is verified.

    Attributes:
        name: of its adapter; its subjects are called ``name.layer``.
        distribution: its name on the package index.
        lowest, highest: versions between which the adapter has been tried.
        install: the shell command that installs it beside the torch that is there.
    """

    name: str
    distribution: str
    lowest: str
    highest: str
    install: str

    @property
    def version(self) -> str:
        """The installed version, or "" if there is none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    @property
    def tried(self) -> bool:
        """Whether the installed version lies between those that have been tried."""
        return _numbers(self.lowest) <= _numbers(self.version) <= _numbers(self.highest)

    @property
    def range(self) -> str:
        """The versions that have been tried, in words."""
        return self.lowest if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def subjects(self) -> dict[str, Subject]:
        """Its subjects by name, without the library's.

        Raises:
            CaseError: the library is not installed, or cannot be imported.
        """
        if not self.version:
            raise CaseError(f"Expected {self.distribution} to be installed but it is not: {self.install}")
        if not self.tried:
            warnings.warn(f"tpverify has been tried with {self.distribution} {self.range}; this is {self.version}", stacklevel=2)
        try:
            subjects: dict[str, Subject] = importlib.import_module(f"tpverify.adapters.{self.name}").SUBJECTS
        except ImportError as error:
            raise CaseError(f"Expected {self.distribution} {self.version} to import but it raised {error}: {self.install}") from error
        return subjects


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


LIBRARIES = {
    library.name: library
    for library in (
        Library("deepspeed", "deepspeed", "0.19.8", "0.19.8", "pip install 'tpverify[deepspeed]'"),
        Library("fairscale", "fairscale", "0.4.13", "0.4.13", "pip install 'tpverify[fairscale]'"),
        Library("megatron_core", "megatron-core", "0.16.1", "0.19.2", "pip install 'tpverify[megatron]'"),
        Library("torchtitan", "torchtitan", "0.3.0", "0.3.0", "pip install 'tpverify[torchtitan]'"),
        Library("transformers", "transformers", "5.24.0", "5.24.0", "pip install 'tpverify[transformers]'"),
    )
}
"""Every library that has an adapter, by name."""


def library_of(subject_name: str) -> Library | None:
    """The library that a subject's name begins with, as in ``fairscale.column_parallel_linear``; None if it names none."""
    return LIBRARIES.get(subject_name.partition(".")[0]) if "." in subject_name and ":" not in subject_name else None
