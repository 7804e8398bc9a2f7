"""The HTML report: one self-contained page, no scripts and nothing from elsewhere, everything escaped."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from tpverify.report.ledger_text import ledger_rows
from tpverify.report.report import Report, verdict
from tpverify.report.text import checks_held, closing_line
from tpverify.violation import failure_report

TEMPLATE = "page.html.j2"


def write_html(report: Report) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(files("tpverify.report").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        report=report,
        closing_line=closing_line(report),
        subjects=[
            {
                "result": result,
                "verdict": verdict(result),
                "held": checks_held(result),
                "violated": {violation.check for violation in result.violations},
                "most": max(result.world_sizes.values(), default=0),
                "failures": [{"violation": violation, "text": failure_report(violation)} for violation in result.violations],
                "ledger": ledger_rows(report.ledgers[result.subject]) if result.subject in report.ledgers else [],
            }
            for result in report.results
        ],
    )
