"""Figures: one style per method, curves with a band over seeds, and reference slopes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import numpy as np

from rabo.errors import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of Okabe and Ito (2008), which colour-blind readers can tell apart. Yellow is missing
# because it vanishes on white. Grey replaces black, which vanishes on a dark page.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7a7a7a")
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY = COLOURS
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # of plotly: of matplotlib


class Style(NamedTuple):
    """The colour and the dash of a line."""

    colour: str
    dash: str = "solid"


METHOD_STYLES: Mapping[str, Style] = {
    "rabo": Style(BLUE),
    "simrabo": Style(BLUE, "dash"),
    "rafbo": Style(ORANGE),
    "simrafbo": Style(ORANGE, "dash"),
    "fedmbo": Style(GREEN),
    "static": Style(GREEN, "dash"),
    "dist-maml": Style(GREEN, "dot"),
    "fednest": Style(VERMILLION),
    "fedrolex": Style(VERMILLION, "dash"),
    "aggitd": Style(PURPLE),
    "oap": Style(PURPLE, "dash"),
    "oap-structured": Style(PURPLE, "dot"),
    "fedbioacc": Style(PURPLE, "dashdot"),
    "simfbo": Style(SKY),
    "shrofbo": Style(SKY, "dash"),
    "fiarse": Style(SKY, "dot"),
    "fiarse-structured": Style(SKY, "dashdot"),
    "fedavg": Style(GREY),
    "dist-protonet": Style(GREY, "dash"),
    "fedbio": Style(GREY, "dashdot"),
}


def styles_of(methods: Mapping[str, str]) -> dict[str, Style]:
    """Return the style of every line of a figure, given the method of each line.

    A method has the same colour in every figure. Lines of one colour differ by their dash.
    """
    styles: dict[str, Style] = {}
    for line, method in methods.items():
        other = Style(COLOURS[crc32(method.encode()) % len(COLOURS)])
        own = METHOD_STYLES.get(method, other)
        choices = [own, *(Style(own.colour, dash) for dash in DASHES)]
        styles[line] = next((s for s in choices if s not in styles.values()), own)
    return styles


class Band(NamedTuple):
    """The mean of several curves, and the lowest and highest value at each point."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def band_of(curves: Sequence[Mapping[int, tuple[float, float]]]) -> Band:
    """Return the mean over seeds at each round, given every seed's (x, value) by round.

    A round that only some seeds reached shows the mean of these seeds.
    """
    points = [
        [curve[round] for curve in curves if round in curve]
        for round in sorted({round for curve in curves for round in curve})
    ]
    values = [[value for _, value in each] for each in points]
    return Band(
        x=[fmean(x for x, _ in each) for each in points],
        mean=[fmean(each) for each in values],
        low=[min(each) for each in values],
        high=[max(each) for each in values],
    )


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit y ∝ x^slope by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def figure_class() -> "type[Figure]":
    """Import matplotlib, which only figures need."""
    with needs("compare", "figures"):
        from matplotlib.figure import Figure
    return Figure


def new_figure(num_panels: int) -> "tuple[Figure, list[Axes]]":
    """Return a figure with panels side by side."""
    figure = figure_class()(figsize=(5.6 * num_panels, 5.0), layout="constrained", dpi=130)
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def label(panel: "Axes", title: str, x: str, y: str, scale: str = "log-log") -> None:
    """Name the axes, choose their scales, and add a grid and a legend below."""
    panel.set(title=title, xlabel=x, ylabel=y)
    panel.set_xscale(scale.split("-")[0])
    panel.set_yscale(scale.split("-")[1])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def mark(panel: "Axes", x: Sequence[float]) -> None:
    """Put ticks at the measured values and nowhere else."""
    panel.set_xticks(list(x), labels=[f"{value:g}" for value in x])
    panel.set_xticks([], minor=True)


def draw_slope(panel: "Axes", x: Sequence[float], start: float, slope: float, name: str) -> None:
    """Draw a straight reference line on logarithmic axes."""
    line = [start * (value / x[0]) ** slope for value in x]
    panel.plot(x, line, color="black", linestyle="--", linewidth=1, label=name)


def draw_band(panel: "Axes", band: Band, style: Style, name: str) -> None:
    """Draw the mean of several seeds, and a band from the lowest to the highest."""
    line = {"color": style.colour, "linestyle": DASHES[style.dash], "linewidth": 1.5}
    panel.plot(band.x, band.mean, marker=".", label=name, **line)
    panel.fill_between(band.x, band.low, band.high, color=style.colour, alpha=0.2, linewidth=0)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of its file name, without a date: equal data, equal bytes."""
    from matplotlib import rc_context

    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "rabo", "svg.fonttype": "none"}):
        figure.savefig(path, metadata=metadata)
