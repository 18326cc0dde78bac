"""Figures of records: curves with a band over seeds, bars of costs, errors of estimators."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from experiments.grids.estimators import ESTIMATED
from experiments.records import Record
from experiments.tables import estimator_mean
from rabo.algorithms import canonical
from rabo.runs.plots import (
    COLOURS,
    Style,
    band_of,
    draw_band,
    figure_class,
    label,
    new_figure,
    save,
    styles_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONG_NUMBER = re.compile(r"(?<![\w#.])(-?\d+\.\d)\d+")
MARKERS = "osD^v<>Pv*X"
AXES = {  # of a panel: the name of the axis, and the unit
    "round": ("rounds", 1.0),
    "bytes": ("gigabytes", 1e9),
    "multiply_adds": ("multiply-adds (T)", 1e12),
}


class Panel(NamedTuple):
    """A title, the cost on the horizontal axis, and the seeds of each line by its label."""

    title: str
    axis: str
    lines: Mapping[str, Sequence[Record]]
    styles: Mapping[str, Style]
    levels: Sequence[str] = ()  # labels of lines that show their end alone


def styles_by_label(lines: Mapping[str, Sequence[Record]]) -> dict[str, Style]:
    """Return the style of each line: that of its algorithm in every figure."""
    return styles_of({text: algorithm_of(records) for text, records in lines.items()})


def algorithm_of(records: Sequence[Record]) -> str:
    """Return the algorithm that runs have trained with."""
    return canonical(records[0].content["config"]["algorithm"])


def draw_panels(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Draw rows of panels; runs that diverged are left out."""
    columns = max(map(len, rows))
    size = (4.4 * columns, 4.6 * len(rows))
    figure = figure_class()(figsize=size, layout="constrained")
    places = figure.subplots(len(rows), columns, squeeze=False)
    for row, own in zip(rows, places, strict=True):
        for panel, place in zip(row, own, strict=True):
            _draw(panel, place)
    save_small(figure, path)


def _draw(panel: Panel, place: "Axes") -> None:
    name, unit = AXES[panel.axis]
    for text, records in panel.lines.items():
        if text in panel.levels:
            end, style = fmean(record.value for record in records), panel.styles[text]
            place.axhline(end, linewidth=1, label=text, color=style.colour, linestyle=":")
            continue
        curves = [
            {
                int(round): (x / unit, 100 * value)
                for round, x, value in zip(
                    record.curve["round"],
                    record.spent(panel.axis),
                    record.curve[record.headline],
                    strict=True,
                )
            }
            for record in records
            if not record.diverged
        ]
        draw_band(place, band_of(curves), panel.styles[text], text)
        place.get_lines()[-1].set_marker("")  # markers would double the file
    scale = "linear-linear" if panel.axis == "round" else "log-linear"
    headline = next(iter(panel.lines.values()))[0].headline.replace("_", " ")
    label(place, panel.title, name, f"{headline} (%)", scale)


def save_small(figure: "Figure", path: Path) -> None:
    """Write an SVG without indentation and with coordinates of one decimal."""
    save(figure, path)
    path.write_text(re.sub(r"\n +", "\n", LONG_NUMBER.sub(r"\1", path.read_text())))


def draw_costs(shares: Mapping[str, Mapping[str, tuple[float, float | None]]], path: Path) -> None:
    """Draw shares of a baseline's cost in per cent: panel -> bar -> (ours, the paper's)."""
    figure, panels = new_figure(len(shares))
    for panel, (title, bars) in zip(panels, shares.items(), strict=True):
        places = range(len(bars))
        ours = [own for own, _ in bars.values()]
        paper = [said or 0.0 for _, said in bars.values()]
        panel.bar([p - 0.2 for p in places], paper, 0.4, label="paper", color=COLOURS[1])
        panel.bar([p + 0.2 for p in places], ours, 0.4, label="measured", color=COLOURS[0])
        panel.set_xticks(list(places), list(bars), fontsize=7, rotation=60, ha="right")
        panel.grid(alpha=0.3, axis="y")
        panel.set(title=title, ylabel="% of FedMBO's")
        panel.margins(y=0.2)  # room for the legend above the bars
        panel.legend(fontsize=8)
    save_small(figure, path)


def draw_estimators(records: Sequence[Record], path: Path) -> None:
    """Draw the error of each estimator against rounds, and against its number of gradients."""
    rows = [row for record in records for row in record.content["rows"]]
    figure, (by_round, by_cost) = new_figure(2)
    rounds = sorted({row["round"] for row in rows})
    for i, name in enumerate(ESTIMATED):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        errors = [estimator_mean(rows, name, "error", number) for number in rounds]
        by_round.plot(rounds, errors, color=colour, marker=marker, linewidth=1, label=name)
        cost = estimator_mean(rows, name, "evaluations")
        by_cost.plot([cost], [fmean(errors)], color=colour, marker=marker, ls="", label=name)
    label(by_round, "during training", "round", "relative error", "linear-log")
    label(by_cost, "against its cost", "gradients of f or g", "relative error")
    save_small(figure, path)
