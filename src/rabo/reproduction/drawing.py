"""Figures of runs: lines with a band over seeds, and bars of costs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Record, grouped
from rabo.reproduction.relative import Share, shares_of
from rabo.runs.plots import COLOURS, DASHES, figure_class, label, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARED, SHARED_LABEL = "-shared", ", shared head"  # how methods with one head for all tasks end
LEVELS = ("saddlebrown", "black")
AXES = {
    "rounds": ("rounds", lambda point: point["round"]),
    "bytes": (
        "gigabytes",
        lambda point: (point["spent"]["bytes_up"] + point["spent"]["bytes_down"]) / 1e9,
    ),
    "multiply_adds": (
        "multiply-adds (T)",
        lambda point: point["spent"]["multiply_adds"] / 1e12,
    ),
}


class Panel(NamedTuple):
    """A title, what is on the horizontal axis, and the seeds of every line by its label."""

    title: str
    axis: str
    lines: Mapping[str, Sequence[Record]]
    levels: Sequence[str] = ()  # labels of lines of which only the end is drawn


def draw_curves(grid: Grid, records: Sequence[Record], path: Path) -> None:
    """Draw accuracy against rounds: a panel per setting, or per method where the grid says so."""
    by_method = grid.content.get("panels") == "methods"
    _draw(
        panels_by_method(grid, records)
        if by_method
        else panels_by_setting(grid, records, ["rounds"]),
        path,
    )


def draw_efficiency(grid: Grid, records: Sequence[Record], path: Path) -> None:
    """Draw accuracy against what was sent and against what was computed."""
    _draw(panels_by_setting(grid, records, ["bytes", "multiply_adds"]), path)


def panels_by_setting(
    grid: Grid, records: Sequence[Record], axes: Sequence[str]
) -> list[list[Panel]]:
    """Return a column per setting; methods with a shared head have rows of their own."""
    groups = _drawable(records)
    settings = [s for s in grid.settings if any(key[0] == s for key in groups)]
    rows = []
    for ending in (False, True):
        for axis in axes:
            row = []
            for setting in settings:
                own = grid.methods(setting).items()
                lines = {
                    about["label"]: groups[setting, method]
                    for method, about in own
                    if method.endswith(SHARED) == ending and (setting, method) in groups
                }
                levels = [about["label"] for m, about in own if m in grid.content.get("lines", ())]
                title = grid.settings[setting].get("label", setting)
                row.append(Panel(title + SHARED_LABEL * ending, axis, lines, levels))
            if any(panel.lines for panel in row):
                rows.append(row)
    return rows


def panels_by_method(grid: Grid, records: Sequence[Record]) -> list[list[Panel]]:
    """Return a panel per method, with a line per setting."""
    groups = _drawable(records)
    row = []
    for method, about in grid.content["methods"].items():
        lines = {
            own.get("label", setting): groups[setting, method]
            for setting, own in grid.settings.items()
            if (setting, method) in groups
        }
        if lines:
            row.append(Panel(about["label"], "rounds", lines))
    return [row]


def _drawable(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    return grouped([record for record in records if not record.diverged])


def _draw(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    columns = max(map(len, rows))
    size = (4.4 * columns, 4.6 * len(rows))
    figure = figure_class()(figsize=size, layout="constrained", dpi=110)
    places = figure.subplots(len(rows), columns, squeeze=False)
    labels = [_without_head(text) for row in rows for panel in row for text in panel.lines]
    order = list(dict.fromkeys(labels))  # a method looks the same in all panels
    for row, own in zip(rows, places, strict=True):
        for panel, place in zip(row, own, strict=True):
            if not panel.lines:
                place.set_axis_off()
                continue
            name, along = AXES[panel.axis]
            for text, records in panel.lines.items():
                is_level, i = text in panel.levels, order.index(_without_head(text))
                (_level if is_level else _band)(place, records, along, text, i)
            scale = "linear-linear" if panel.axis == "rounds" else "log-linear"
            headline = next(iter(panel.lines.values()))[0].headline.replace("_", " ")
            label(place, panel.title, name, f"{headline} (%)", scale)
    save(figure, path)


def _without_head(text: str) -> str:
    return text.removesuffix(SHARED_LABEL)


def _style(i: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": [*DASHES.values()][i // len(COLOURS) % len(DASHES)],
    }


def _band(
    place: "Axes", own: Sequence[Record], along: Callable[[Mapping], float], name: str, i: int
) -> None:
    """Draw the mean over seeds, and a band from the lowest to the highest."""
    points = list(zip(*(record.curve for record in own), strict=True))
    xs = [fmean(along(point) for point in same) for same in points]
    values = [[100 * point["metrics"][own[0].headline] for point in same] for same in points]
    place.plot(xs, [fmean(each) for each in values], linewidth=1.2, label=name, **_style(i))
    low, high = [min(each) for each in values], [max(each) for each in values]
    place.fill_between(xs, low, high, color=_style(i)["color"], alpha=0.15, linewidth=0)


def _level(
    place: "Axes", own: Sequence[Record], along: Callable[[Mapping], float], name: str, i: int
) -> None:
    """Draw where it ended, as a horizontal line."""
    end = fmean(record.value for record in own)
    place.axhline(end, linewidth=1, label=name, color=LEVELS[i % len(LEVELS)], linestyle="--")


def draw_costs(grid: Grid, records: Sequence[Record], path: Path) -> None:
    """Draw bars of multiply-adds and bytes relative to the baseline, the paper's beside them."""
    shares = shares_of(grid, records)
    settings = [s for s in grid.settings if any(share.setting == s for share in shares)]
    figure, panels = new_figure(max(1, len(settings)))
    for panel, setting in zip(panels, settings, strict=False):
        _bars(panel, grid, [share for share in shares if share.setting == setting])
        panel.set(title=grid.settings[setting].get("label", setting), ylabel="% of FedMBO's")
        panel.margins(y=0.2)  # above the bars, for the legend
        panel.legend(fontsize=8)
    save(figure, path)


def _bars(panel: "Axes", grid: Grid, shares: Sequence[Share]) -> None:
    names = [f"{share.label}\n{share.what.replace('_', '-')}" for share in shares]
    ours = [share.ours for share in shares]
    paper = [share.paper or 0.0 for share in shares]
    places = range(len(shares))
    panel.bar([p - 0.2 for p in places], paper, 0.4, label="paper", color=COLOURS[1])
    panel.bar([p + 0.2 for p in places], ours, 0.4, label="ours", color=COLOURS[0])
    panel.set_xticks(list(places), names, fontsize=6, rotation=60, ha="right")
    panel.grid(alpha=0.3, axis="y")
