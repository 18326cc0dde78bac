"""The page of a report: one HTML file that asks nothing of a network.

Every text that comes from a file is escaped, and the page's own policy lets nothing run but its two
scripts.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from rabo.runs.checkpoint import write_atomically
from rabo.runs.report.attendance import client_charts, sat_out
from rabo.runs.report.channels import coverage_charts
from rabo.runs.report.costs import cost_charts
from rabo.runs.report.figures import Chart, count_of, words
from rabo.runs.report.progress import headline_charts, hypergradient_charts, loss_charts
from rabo.runs.report.runs import Run, find_runs, mapping, number, text
from rabo.runs.terminal import short

MOST_OPEN = 3  # runs whose details are open at first
SHARES = (
    "Costs are all that was spent; shares of the full model's leave out what was measured to "
    "choose β."
)


def write_report(paths: Sequence[Path], out: Path) -> list[Run]:
    """Write a page about all runs in folders, and return them."""
    plotly = _plotly()  # what is missing should be said first
    runs = find_runs(paths)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page_of(runs, plotly).encode())
    return runs


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("a report needs plotly: pip install 'rabo[report]'") from error
    return get_plotlyjs()


def page_of(runs: Sequence[Run], plotly: str) -> str:
    """Return the page, with the scripts that draw its charts."""
    style, script = (
        files("rabo.runs.report").joinpath(f"page.{kind}").read_text() for kind in ("css", "js")
    )
    hashes = " ".join(f"'sha256-{_digest(s)}'" for s in (plotly, script))
    policy = (
        f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    )
    tasks = ", ".join(dict.fromkeys(text(run.config, "task") or "unknown task" for run in runs))
    title = f"rabo report: {tasks}, {count_of(len(runs), 'run')}"
    numbers = count()
    body = [
        f"<h1>{escape(title)}</h1>",
        '<noscript><p class="note">The charts need JavaScript; the tables do not.</p></noscript>',
        "<h2>What was reached, and what it cost</h2>",
        _headline_table(runs),
        f'<p class="about">{escape(SHARES)}</p>',
        *_figures([*headline_charts(runs), *hypergradient_charts(runs)], numbers),
        *(_details(run, numbers, is_open=len(runs) <= MOST_OPEN) for run in runs),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{_joined(body)}
</main>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _headline_table(runs: Sequence[Run]) -> str:
    names = {run.headline for run in runs if run.headline}
    result = words(*names) if len(names) == 1 else "result"
    costs, coverage = ("multiply-adds", "bytes"), ("coverage of x", "coverage of y")
    heads = ("run", "algorithm", result, *costs, *coverage, "status")
    rows = [_headline_row(run, is_named=len(names) > 1) for run in runs]
    return _table(heads, rows, "headline numbers")


def _headline_row(run: Run, is_named: bool) -> list[str]:
    metrics = {n: v for done in run.rounds for n, v in mapping(done, "metrics").items()}
    metrics |= mapping(run.summary, "metrics")
    value, interval = number(metrics, run.headline), number(metrics, "interval")
    reached = "–" if value is None else f"{value:.4g}"
    reached += f" ± {interval:.2g}" if value is not None and interval is not None else ""
    if is_named and value is not None:
        reached = f"{words(run.headline)} {reached}"
    last = run.rounds[-1] if run.rounds else {}
    cost = mapping(run.summary, "cost") or mapping(last, "total")
    share = mapping(run.summary, "relative_cost") or mapping(last, "relative_cost")
    coverage = mapping(run.summary, "coverage") or _coverage(run)
    work = number(cost, "multiply_adds")
    traffic = (number(cost, "bytes_up") or 0) + (number(cost, "bytes_down") or 0)
    return [
        run.name,
        text(run.config, "algorithm") or text(run.summary, "algorithm") or "–",
        reached,
        "–" if work is None else f"{short(work)}{_share(share, 'multiply_adds')}",
        "–" if not cost else f"{short(traffic)}B",
        *(_covered(coverage, level) for level in ("x", "y")),
        run.status,
    ]


def _coverage(run: Run) -> dict[str, Any]:
    """Return C* and the share ever trained from the rounds of a run that was not ended."""
    found: dict[str, Any] = {}
    for level in ("x", "y"):
        each = [mapping(mapping(done, "coverage"), level) for done in run.rounds]
        least = [number(c, "minimum") for c in each if number(c, "num_trained")]
        found[f"{level}_min"] = min((n for n in least if n is not None), default=None)
        found[f"{level}_trained"] = each[-1].get("ever_trained") if each else None
    return found


def _covered(coverage: Mapping[str, Any], level: str) -> str:
    least, trained = number(coverage, f"{level}_min"), number(coverage, f"{level}_trained")
    return "–" if least is None or trained is None else f"C* {least:.0f}, {trained:.0%} trained"


def _share(of: Any, name: str) -> str:
    share = number(of, name)
    return "" if share is None else f" ({share:.0%} of full)"


def _details(run: Run, numbers: Iterator[int], is_open: bool) -> str:
    opened = " open" if is_open else ""
    parts = [f'<details class="run"{opened}><summary>{escape(run.name)}</summary>']
    parts.append(f'<p class="about">{escape(str(run.folder))}: {escape(run.status)}.</p>')
    if run.missing:
        lost = "".join(f"<li>{escape(what)}</li>" for what in run.missing)
        parts.append(f'<div class="note">Not in this folder:<ul>{lost}</ul></div>')
    left_out = sat_out(run)
    if left_out:
        parts.append("<h3>Who sat out, and why</h3>")
        rows = [[who, why, str(times)] for who, why, times in left_out]
        parts.append(_table(("who", "why", "rounds"), rows, "who sat out"))
    elif run.rounds:
        parts.append("<p>Nobody sat out, and every answer was used.</p>")
    charts = [*loss_charts(run), *client_charts(run), *cost_charts(run), *coverage_charts(run)]
    parts += _figures(charts, numbers, _picture(run))
    options = [[name, v if isinstance(v, str) else json.dumps(v)] for name, v in run.config.items()]
    if options:
        parts.append('<details class="options"><summary>all options of the run</summary>')
        parts.append(_table(("option", "value"), options, "options") + "</details>")
    return _joined([*parts, "</details>"])


def _picture(run: Run) -> str:
    if not run.picture:
        return ""
    about = (
        "Test tasks: a row is a class, first a drawing it was shown by, then drawings to "
        "recognise; green: recognised, red: taken for the class in the corner."
    )
    source = f"data:image/png;base64,{b64encode(run.picture).decode()}"
    return (
        f'<figure class="picture"><h3>test tasks</h3><img src="{source}" alt="{escape(about)}">'
        f"<figcaption>{escape(about)}</figcaption></figure>"
    )


def _figures(charts: Iterable[Chart], numbers: Iterator[int], first: str = "") -> list[str]:
    drawn = [_figure(chart, next(numbers)) for chart in charts]
    return ['<div class="charts">', first, *drawn, "</div>"] if drawn or first else []


def _figure(chart: Chart, i: int) -> str:
    content = json.dumps(
        {"data": chart.data, "layout": chart.layout}, separators=(",", ":"), allow_nan=False
    )
    content = content.replace("<", "\\u003c")  # nothing in it can end the script
    title, about = escape(chart.title), escape(chart.about)
    height = f"height: {chart.layout['height']:.0f}px"  # its own: plotly fits charts to their place
    return (
        f'<figure><h3>{title}</h3><div class="chart" role="img" aria-label="{title}: {about}" '
        f'style="{height}" data-figure="figure-{i}"></div><figcaption>{about}</figcaption>'
        f'<script type="application/json" id="figure-{i}">{content}</script></figure>'
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], name: str) -> str:
    """Return a table; roles keep it one for readers where narrow screens show it as a list."""
    head = "".join(f'<th scope="col" role="columnheader">{escape(cell)}</th>' for cell in heads)
    body = "".join(f'<tr role="row">{_cells(heads, row)}</tr>' for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">'
        f'<table role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table></div>'
    )


def _cells(heads: Sequence[str], row: Sequence[str]) -> str:
    first = f'<th scope="row" role="rowheader">{escape(row[0])}</th>'
    return first + "".join(
        f'<td role="cell" data-label="{escape(head)}">{escape(cell)}</td>'
        for head, cell in zip(heads[1:], row[1:], strict=True)
    )


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
