"""Lines over rounds, bytes and multiply-adds: one per run, or the mean and a band over seeds."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from rabo.algorithms import canonical
from rabo.runs.plots import GREY, Band, Style, band_of, styles_of
from rabo.runs.report.figures import Chart, layout_of, layout_over_rounds, words
from rabo.runs.report.runs import Run, mapping, number, text

MOST_NAMED = 6  # groups that a description names
LENGTHS = ("norm", "distance")  # metrics that fall by orders of magnitude
HOVER = "%{meta}<br>%{x}: %{y:.4g}<extra></extra>"
HOVER_SEEDS = (
    "%{meta}<br>%{x}: %{y:.4g} (%{customdata[0]:.4g} to %{customdata[1]:.4g})<extra></extra>"
)
Axis: TypeAlias = Callable[[Run], Mapping[int, float]]
Curve: TypeAlias = Mapping[int, tuple[float, float]]  # (x, value) by round
Targets: TypeAlias = Mapping[str, Sequence[float]]


def headline_charts(runs: Sequence[Run], targets: Targets | None = None) -> list[Chart]:
    """Draw the headline metric against rounds, bytes and multiply-adds, with its targets."""
    axes = {"rounds": _rounds, "bytes sent and received": _traffic, "multiply-adds": _work}
    charts = []
    for name in dict.fromkeys(run.headline for run in runs):
        scale = "log" if name.endswith(LENGTHS) else "linear"
        for axis, spent in axes.items():
            curves = [(r, _curve(r, name, spent) if r.headline == name else {}) for r in runs]
            title = f"{words(name)} against {axis}"
            levels = (targets or {}).get(name, ())
            charts.append(_lines(title, axis, words(name), curves, scale, targets=levels))
    return [chart for chart in charts if chart.data]


def hypergradient_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw the norm of the hypergradient and the residual of its linear system."""
    charts = []
    for name, title in (
        ("hypergradient_norm", "norm of the hypergradient"),
        ("residual", "residual of the hypergradient"),
    ):
        curves = [(run, _curve(run, name, _rounds)) for run in runs]
        charts.append(_lines(title, "rounds", words(name), curves, "log", at="round"))
    return [chart for chart in charts if chart.data]


def _curve(run: Run, name: str, axis: Axis) -> Curve:
    along = axis(run)
    return {done["round"]: (along[done["round"]], value) for done, value in run.curve(name)}


def _rounds(run: Run) -> dict[int, float]:
    return {done["round"]: done["round"] + 1 for done in run.rounds}


def _traffic(run: Run) -> dict[int, float]:
    return _spent(run, "bytes_up", "bytes_down")


def _work(run: Run) -> dict[int, float]:
    return _spent(run, "multiply_adds")


def _spent(run: Run, *names: str) -> dict[int, float]:
    """Return the total cost at the end of each round; old runs record the cost of each round."""
    is_told = all("total" in done for done in run.rounds)
    key = "total" if is_told else "cost"
    each = [sum(number(mapping(done, key), n) or 0 for n in names) for done in run.rounds]
    sums = each if is_told else accumulate(each)
    return {done["round"]: value for done, value in zip(run.rounds, sums, strict=True)}


def _lines(
    title: str,
    x: str,
    y: str,
    curves: Sequence[tuple[Run, Curve]],
    scale: str,
    *,
    at: str = "evaluation",
    targets: Sequence[float] = (),
) -> Chart:
    """Draw each group of runs in the colour of its method, which it has in all charts."""
    bands = _bands(curves, positive=scale == "log")
    styles = styles_of({run.group: _method(run) for run, _ in curves})
    data = [
        trace
        for group, (num_seeds, band) in bands.items()
        for trace in _traces(group, band, styles[group], num_seeds)
    ]
    xs = [value for _, band in bands.values() for value in band.x]
    data += [_target(value, max(xs)) for value in targets if data]
    named = len(styles) > 1 or len(data) > 1
    data = [{**trace, "showlegend": named and trace["mode"] != "none"} for trace in data]
    layout = layout_over_rounds(xs, y, scale) if x == "rounds" else layout_of(x, y, y_type=scale)
    layout["xaxis"] |= {"rangemode": "tozero"}
    if len({value for _, band in bands.values() for value in (*band.low, *band.high)}) == 1:
        layout["yaxis"] |= {"rangemode": "tozero"}
    return Chart(title, _in_words(bands, at, targets), data, layout)


def _bands(curves: Sequence[tuple[Run, Curve]], positive: bool) -> dict[str, tuple[int, Band]]:
    """Return the number of runs and their band, by group; a log axis shows positive values."""
    groups: dict[str, list[Curve]] = {}
    for run, curve in curves:
        shown = {round: point for round, point in curve.items() if point[1] > 0 or not positive}
        if shown:
            groups.setdefault(run.group, []).append(shown)
    return {group: (len(own), band_of(own)) for group, own in groups.items()}


def _method(run: Run) -> str:
    told = text(run.config, "algorithm") or text(run.summary, "algorithm") or run.group
    return canonical(told)


def _traces(group: str, band: Band, style: Style, num_seeds: int) -> list[dict[str, Any]]:
    """Return the line of a group and, for several seeds, the band below it."""
    common = {"type": "scatter", "name": group, "meta": group, "legendgroup": group}
    line = {
        **common,
        "mode": "lines+markers" if len(band.x) <= 60 else "lines",
        "x": band.x,
        "y": band.mean,
        "line": {"color": style.colour, "dash": style.dash, "width": 2},
        "marker": {"size": 5 if len(band.x) > 1 else 9},
        "hovertemplate": HOVER,
    }
    if num_seeds == 1:
        return [line]
    spread = {
        **common,
        "mode": "none",
        "x": [*band.x, *reversed(band.x)],
        "y": [*band.high, *reversed(band.low)],
        "fill": "toself",
        "fillcolor": style.colour,
        "opacity": 0.2,
        "hoverinfo": "skip",
    }
    ends = [list(pair) for pair in zip(band.low, band.high, strict=True)]
    return [spread, line | {"customdata": ends, "hovertemplate": HOVER_SEEDS}]


def _target(value: float, end: float) -> dict[str, Any]:
    """Return a level line that the legend names."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"target {value:.4g}",
        "x": [0, end],
        "y": [value, value],
        "line": {"color": GREY, "dash": "dot", "width": 1.5},
        "hoverinfo": "name",
    }


def _in_words(bands: Mapping[str, tuple[int, Band]], at: str, targets: Sequence[float]) -> str:
    """Describe where each group begins and ends."""
    parts = []
    for group, (num_seeds, band) in bands.items():
        name = group if num_seeds == 1 else f"{group}, mean of {num_seeds} seeds"
        first, last = band.mean[0], band.mean[-1]
        is_single = len(band.x) == 1
        values = f"{last:.3g} (one {at})" if is_single else f"from {first:.3g} to {last:.3g}"
        parts.append(f"{name}: {values}")
    if len(parts) > MOST_NAMED:
        parts[MOST_NAMED:] = [f"and {len(parts) - MOST_NAMED} more"]
    parts += [f"dotted: target {value:.4g}" for value in targets]
    if any(num_seeds > 1 for num_seeds, _ in bands.values()):
        parts.append("bands reach from the lowest to the highest seed")
    return "; ".join(parts) + "."
