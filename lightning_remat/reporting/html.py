"""A plan as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_remat.__about__ import __version__
from lightning_remat.errors import ConfigurationError
from lightning_remat.reporting import wording

if TYPE_CHECKING:
    from lightning_remat.reporting.plan_report import PlanReport


def page(report: PlanReport) -> str:
    """The page of a report. Without matplotlib it says so in place of the plots."""
    facts = report.facts
    missing, plots = "", []
    try:
        from lightning_remat.reporting.plots import front_svg, memory_svg

        # Our own drawings, the only text here that is not escaped.
        plots = [
            (Markup(memory_svg(report)), wording.MEMORY_PLOT),
            (Markup(front_svg(report)), wording.FRONT_PLOT),
        ]
    except ConfigurationError as error:
        missing = str(error)
    largest = max((row.bytes for row in facts.rows), default=0) or 1
    rows = [
        (
            wording.cells(row, facts),
            100 * row.kept_bytes / largest,
            100 * row.moved_bytes / largest,
            100 * row.recomputed_bytes / largest,
        )
        for row in facts.rows
    ]
    environment = Environment(
        loader=PackageLoader("lightning_remat.reporting", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("plan.html.jinja").render(
        title=wording.title(facts),
        figure_heads=wording.FIGURES,
        figures=wording.figures(facts),
        notes=wording.notes(facts),
        plots=plots,
        missing=missing,
        heads=wording.heads(facts),
        rows=rows,
        totals=wording.totals(facts),
        explanation=wording.explanation(facts),
        legend=wording.legend(facts),
        moves=bool(facts.moved_bytes),
        version=__version__,
        source=f"{facts.device}, trace: {facts.source}",
    )
