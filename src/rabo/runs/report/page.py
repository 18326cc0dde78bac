"""The page of a report: one HTML file that needs no network.

The template escapes every text of a file. The page's content security policy lets only the page's
own scripts run, which carry a fresh nonce.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

from rabo.errors import needs
from rabo.runs.checkpoint import write_atomically
from rabo.runs.report.attendance import client_charts, sat_out
from rabo.runs.report.channels import coverage_charts
from rabo.runs.report.classes import loss_charts
from rabo.runs.report.costs import cost_charts
from rabo.runs.report.figures import Chart, count_of, html_of
from rabo.runs.report.progress import Targets, headline_charts, hypergradient_charts
from rabo.runs.report.runs import Run, find_runs, find_targets, text
from rabo.runs.report.summary import headline_table

MOST_OPEN = 3  # runs whose details are open at first
PICTURE = (
    "Test tasks: one row per class. The first drawing shows the class, the others are classified. "
    "Green: recognised; red: taken for the class in the corner."
)


def write_report(paths: Sequence[Path], out: Path) -> list[Run]:
    """Write a page about all runs in folders, and return them."""
    with needs("report", "reports"):
        import jinja2  # noqa: F401  # a missing package is reported before anything is read
        from plotly.offline import get_plotlyjs
    runs = find_runs(paths)
    page = page_of(runs, get_plotlyjs(), find_targets(paths))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode())
    return runs


def page_of(runs: Sequence[Run], plotly: str, targets: Targets | None = None) -> str:
    """Return the page, with the script that draws its charts."""
    with needs("report", "reports"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    nonce, numbers = token_urlsafe(16), count()

    def drawn(chart: Chart) -> str:
        html = html_of(chart, f"chart-{next(numbers)}")
        return Markup(html.replace("<script>", f'<script nonce="{nonce}">'))

    environment = Environment(
        loader=PackageLoader("rabo.runs.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["drawn"] = drawn
    tasks = ", ".join(dict.fromkeys(text(run.config, "task") or "unknown task" for run in runs))
    heads, rows = headline_table(runs)
    return environment.get_template("page.html.jinja").render(
        title=f"rabo report: {tasks}, {count_of(len(runs), 'run')}",
        nonce=nonce,
        plotly=Markup(plotly),
        heads=heads,
        rows=rows,
        charts=[*headline_charts(runs, targets), *hypergradient_charts(runs)],
        runs=list(map(_details, runs)),
        most_open=MOST_OPEN,
        picture_about=PICTURE,
    )


def _details(run: Run) -> dict[str, Any]:
    """Return the values of one run's section."""
    charts = [loss_charts, client_charts, cost_charts, coverage_charts]
    return {
        "name": run.name,
        "folder": run.folder,
        "status": run.status,
        "missing": run.missing,
        "absences": sat_out(run),
        "has_rounds": bool(run.rounds),
        "options": [[k, v if isinstance(v, str) else json.dumps(v)] for k, v in run.config.items()],
        "picture": b64encode(run.picture).decode(),
        "charts": [chart for charts_of in charts for chart in charts_of(run)],
    }
