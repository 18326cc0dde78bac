"""Figures, and the slopes that they show."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7")


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit y ∝ x^slope by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def figure_class() -> "type[Figure]":
    """Import matplotlib, which only figures need."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'rabo[plots]'") from error
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


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG; a `Figure` without pyplot draws with Agg and needs no display."""
    figure.savefig(path, format="png")
