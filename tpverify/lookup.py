"""From names to things: built-in subjects, ``module:attribute``, and the config classes that the text of a case mentions."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from tpverify.adapters.libraries import library_of
from tpverify.case import Case, parse_case, subject_of
from tpverify.config import Config
from tpverify.description import check_subject
from tpverify.errors import CaseError, SubjectError
from tpverify.subjects.subject import Subject


def builtin_subjects() -> dict[str, Subject]:
    """The subjects that come with tpverify, by name."""
    from tpverify.subjects.builtin import BUILTIN  # building their strategies takes a moment

    return dict(BUILTIN)


def load_subject(name: str) -> Subject:
    """A built-in subject, ``library.layer`` of an adapter, or ``module:attribute`` with the current directory importable.

    Raises:
        CaseError: no such subject, module or attribute.
        SubjectError: the module raises when imported, or the attribute is not a Subject.
    """
    if ":" not in name:
        library = library_of(name)
        known = {f"{library.name}.{layer}": subject for layer, subject in library.subjects().items()} if library else builtin_subjects()
        if name in known:
            return known[name]
        stem = name.removesuffix(".py")
        way_out = f": did you mean {stem}:SUBJECT?" if os.path.exists(f"{stem}.py") else f"{_did_you_mean(name, known)}; see: tpverify list"
        raise CaseError(f"Expected a built-in subject or module:attribute but got {name!r}{way_out}")
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise CaseError(f"Expected module:attribute but got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            way_out = "leave out the .py" if module_name.endswith(".py") else f"no such module in {os.getcwd()} or on sys.path"
            raise CaseError(f"Expected an importable module but got {module_name!r}: {way_out}") from error
        raise SubjectError(f"Expected {module_name!r} to import but it needs a module that is missing: {error.name}") from error
    except (Exception, SystemExit) as error:
        raise SubjectError(f"Expected {module_name!r} to import but it raised {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        subjects = [key for key, value in vars(module).items() if isinstance(value, Subject)]
        raise CaseError(f"Expected an attribute of {module_name!r} but got {attribute!r}{_did_you_mean(attribute, subjects)}")
    if not isinstance(found, Subject):
        raise SubjectError(f"Expected {name!r} to be a tpverify.Subject but got {type(found).__name__}")
    subject: Subject = dataclasses.replace(found, name=name)
    return subject


def addressed(subject: Subject) -> Subject:
    """The subject under a name that ``tpverify replay`` understands, where it can be found in an imported module.

    Raises:
        SubjectError: ``subject`` is none.
    """
    check_subject(subject)
    if ":" in subject.name or builtin_subjects().get(subject.name) is subject:
        return subject
    # A module that only imports the subject may not be importable by name: the home of its functions comes first.
    homes = [getattr(function, "__module__", "") for function in (subject.parallel, subject.reference, subject.inputs)]
    modules = {name: sys.modules[name] for name in homes if name in sys.modules} | sys.modules
    for module_name, module in modules.items():
        if module_name in ("__main__", "__mp_main__") or module_name.startswith("tpverify."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is subject:
                renamed: Subject = dataclasses.replace(subject, name=f"{module_name}:{attribute}")
                return renamed
    return subject


def read_case(text: str) -> tuple[Subject, Case]:
    """The subject and the case in the text that a failure report shows.

    Raises:
        CaseError: the text is not a case, or its subject does not exist.
        SubjectError: the subject's module cannot be used.
    """
    subject = load_subject(subject_of(text))
    return subject, parse_case(text, config_types(subject))


def config_types(subject: Subject) -> dict[str, type]:
    """The dataclasses and enums that the subject's functions, its module and these classes' modules can see, by class name."""
    found: dict[str, type] = {}
    spaces: list[Mapping[str, Any]] = [vars(sys.modules[subject.name.partition(":")[0]])] if _is_imported(subject) else []
    for function in (subject.reference, subject.parallel, subject.inputs, subject.configs, subject.outputs):
        target = inspect.unwrap(function) if callable(function) else function
        module = sys.modules.get(getattr(target, "__module__", None) or "")
        spaces += [getattr(target, "__globals__", {}), vars(module) if module else {}]
    for space in spaces:
        found |= _config_classes(space)
    for home in sorted({value.__module__ for value in found.values()} & set(sys.modules)):
        found = _config_classes(vars(sys.modules[home])) | found
    return found | {"Config": Config}


def _is_imported(subject: Subject) -> bool:
    return ":" in subject.name and subject.name.partition(":")[0] in sys.modules


def _config_classes(space: Mapping[str, Any]) -> dict[str, type]:
    classes = {name: value for name, value in list(space.items()) if isinstance(value, type)}
    return {name: value for name, value in classes.items() if dataclasses.is_dataclass(value) or issubclass(value, Enum)}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f": did you mean {' or '.join(close)}?" if close else ""
