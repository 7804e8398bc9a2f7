"""Adapters of libraries: a clear word where one is missing, cannot be imported, or has not been tried."""

from __future__ import annotations

import re

import pytest

from tpverify.adapters.libraries import LIBRARIES, Library, library_of
from tpverify.errors import CaseError
from tpverify.verification import load_subject


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Library("missing", "no-such-distribution", "1", "2", "pip install no-such-distribution")
    monkeypatch.setitem(LIBRARIES, "missing", missing)
    with pytest.raises(CaseError, match="Expected no-such-distribution to be installed but it is not: pip install no-such-distribution"):
        load_subject("missing.layer")


def test_a_library_that_does_not_import_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "broken", Library("broken", "pytest", "0", "999", "pip install pytest"))
    with pytest.raises(CaseError, match=r"Expected pytest .* to import but it raised No module named 'tpverify.adapters.broken'"):
        load_subject("broken.layer")


@pytest.mark.parametrize(("lowest", "highest"), [("0.1", "0.2"), ("998.0", "999.0")])
def test_an_untried_version_is_warned_of(lowest: str, highest: str) -> None:
    library = Library("linear", "pytest", lowest, highest, "pip install pytest")
    with (
        pytest.warns(UserWarning, match=re.escape(f"tried with pytest {lowest} to {highest}; this is {library.version}")),
        pytest.raises(CaseError),
    ):
        library.subjects()


def test_versions_are_compared_number_by_number() -> None:
    assert Library("x", "pytest", "7.10", "999.2.post1", "").tried
    assert not Library("x", "pytest", "999.9", "999.10", "").tried


def test_only_a_library_s_name_in_front_of_a_dot_is_one() -> None:
    assert library_of("fairscale.mappings") is LIBRARIES["fairscale"]
    assert library_of("fairscale") is None and library_of("fairscale.py:layer") is None and library_of("mlp") is None
