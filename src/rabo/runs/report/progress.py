"""How runs went: lines over rounds, bytes and multiply-adds."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from rabo.runs.report.figures import (
    COLOURS,
    Chart,
    count_of,
    layout_of,
    layout_over_rounds,
    plain,
    words,
)
from rabo.runs.report.runs import Run, mapping, number, numbers

DASHES = ("solid", "dash", "dot", "dashdot")
MOST_NAMED = 6  # runs that a description names
LENGTHS = ("norm", "distance")  # metrics that fall by orders of magnitude
Axis: TypeAlias = Callable[[Run], Mapping[int, float]]
Points: TypeAlias = Sequence[tuple[float, float]]


def headline_charts(runs: Sequence[Run]) -> list[Chart]:
    """The headline against rounds, bytes and multiply-adds: a line per run."""
    axes = {"rounds": _rounds, "bytes sent and received": _traffic, "multiply-adds": _work}
    charts = []
    for name in dict.fromkeys(run.headline for run in runs):
        for axis, spent in axes.items():
            lines = [(r, _points(r, name, spent) if r.headline == name else []) for r in runs]
            title, scale = f"{words(name)} against {axis}", "linear"
            if name.endswith(LENGTHS):
                lines, scale = _positive(lines), "log"
            charts.append(_lines(title, axis, words(name), lines, scale))
    return [chart for chart in charts if chart.data]


def hypergradient_charts(runs: Sequence[Run]) -> list[Chart]:
    """The length of the hypergradient, and what its linear system leaves."""
    charts = []
    for name, title in (
        ("hypergradient_norm", "norm of the hypergradient"),
        ("residual", "residual of the hypergradient"),
    ):
        lines = _positive([(run, _points(run, name, _rounds)) for run in runs])
        charts.append(_lines(title, "rounds", words(name), lines, scale="log", at="round"))
    return [chart for chart in charts if chart.data]


def loss_charts(run: Run) -> list[Chart]:
    """The parameters of a tuned loss and the accuracy on each class, over rounds."""
    counts = dict(enumerate(numbers(run.loss, "class_counts")))
    charts = []
    for name, title in (
        ("w", "w, the weight of each class"),
        ("l", "l, the offset of each class"),
        ("delta", "Δ, the scale of each class"),
        ("accuracy_per_class", "accuracy on each class"),
    ):
        found = run.vectors(name)
        if not found:
            continue
        num_classes = max(len(values) for _, values in found)
        data = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"class {k}" + (f" ({n:.0f})" if (n := counts.get(k)) is not None else ""),
                "x": [round for round, _ in found],
                "y": [values[k] if k < len(values) else None for _, values in found],
                "line": {"color": _ramp(k, num_classes), "width": 1.5},
                "marker": {"size": 4},
            }
            for k in range(num_classes)
        ]
        about = f"{title}, at {count_of(len(found), 'evaluation')}; classes from the first, blue, "
        about += "to the last, orange"
        about += "; in brackets: training images." if counts else "."
        layout = layout_over_rounds((round for round, _ in found), words(name))
        charts.append(Chart(title, about, data, layout))
    return charts


def _positive(lines: Sequence[tuple[Run, Points]]) -> list[tuple[Run, Points]]:
    """Leave out what a logarithm cannot show."""
    return [(run, [(x, y) for x, y in points if y > 0]) for run, points in lines]


def _points(run: Run, name: str, axis: Axis) -> list[tuple[float, float]]:
    along = axis(run)
    return [(along[done["round"]], value) for done, value in run.curve(name)]


def _rounds(run: Run) -> dict[int, float]:
    return {done["round"]: done["round"] + 1 for done in run.rounds}


def _traffic(run: Run) -> dict[int, float]:
    return _spent(run, "bytes_up", "bytes_down")


def _work(run: Run) -> dict[int, float]:
    return _spent(run, "multiply_adds")


def _spent(run: Run, *names: str) -> dict[int, float]:
    """Return what was spent until the end of each round; old runs say what each round took."""
    is_told = all("total" in done for done in run.rounds)
    key = "total" if is_told else "cost"
    each = [sum(number(mapping(done, key), n) or 0 for n in names) for done in run.rounds]
    sums = each if is_told else accumulate(each)
    return {done["round"]: value for done, value in zip(run.rounds, sums, strict=True)}


def _lines(
    title: str,
    x: str,
    y: str,
    lines: Sequence[tuple[Run, Points]],
    scale: str = "linear",
    at: str = "evaluation",
) -> Chart:
    """Draw a line per run, in the colour its group has in all charts; a point `at` each."""
    groups = list(dict.fromkeys(run.group for run, _ in lines))
    shown: set[str] = set()
    data = []
    for run, points in lines:
        if not points:
            continue
        i = groups.index(run.group)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) <= 60 else "lines",
                "name": plain(run.group),
                "legendgroup": str(i),
                "showlegend": run.group not in shown and len(groups) > 1,
                "x": [a for a, _ in points],
                "y": [b for _, b in points],
                "line": {
                    "color": COLOURS[i % len(COLOURS)],
                    "dash": DASHES[i // len(COLOURS) % len(DASHES)],
                    "width": 2,
                },
                "marker": {"size": 5 if len(points) > 1 else 9},
                "hovertemplate": f"{plain(run.name)}<br>%{{x}}: %{{y:.4g}}<extra></extra>",
            }
        )
        shown.add(run.group)
    everywhere = [point for _, points in lines for point in points]
    if x == "rounds":
        layout = layout_over_rounds((a for a, _ in everywhere), y, y_type=scale)
    else:
        layout = layout_of(x, y, y_type=scale)
    layout["xaxis"] |= {"rangemode": "tozero"}
    if len({b for _, b in everywhere}) == 1:
        layout["yaxis"] |= {"rangemode": "tozero"}
    ends = [_in_words(run.name, points, at) for run, points in lines if points]
    more = f"; and {len(ends) - MOST_NAMED} more" if len(ends) > MOST_NAMED else ""
    return Chart(title, "; ".join(ends[:MOST_NAMED]) + more + ".", data, layout)


def _in_words(name: str, points: Points, at: str) -> str:
    (_, first), (_, last) = points[0], points[-1]
    if len(points) == 1:
        return f"{name}: {last:.3g} (one {at})"
    return f"{name}: from {first:.3g} to {last:.3g}"


def _ramp(k: int, number_of: int) -> str:
    """Return a colour between blue and orange."""
    share = k / max(1, number_of - 1)
    blue, orange = (0, 119, 187), (238, 119, 51)
    mixed = (round(a + share * (b - a)) for a, b in zip(blue, orange, strict=True))
    return f"rgb({','.join(map(str, mixed))})"
