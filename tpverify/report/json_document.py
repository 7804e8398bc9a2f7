"""The JSON document: one schema for the command line, the pytest plugin and files; equal seeds give equal bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tpverify.report.report import Report

SCHEMA_VERSION = 1


def as_document(report: Report) -> dict[str, Any]:
    """``schema_version, passed, seed, subjects`` (see :meth:`tpverify.result.Result.as_dict`) and ``errors``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": report.passed,
        "seed": report.seed,
        "subjects": [result.as_dict() for result in report.results],
        "errors": [asdict(failure) for failure in report.failures],
    }


def write_json(report: Report) -> str:
    """The document as text, keys sorted, with a final newline."""
    return json.dumps(as_document(report), indent=2, sort_keys=True) + "\n"
