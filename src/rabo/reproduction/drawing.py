"""Figures of runs: lines with bands over seeds, and bars of costs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rabo.comparison import STYLES
from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Record, grouped, spread
from rabo.reproduction.relative import Share, shares_of
from rabo.theory.plots import COLOURS, label, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw_curves(grid: Grid, records: Sequence[Record], path: Path) -> None:
    """Draw accuracy against rounds, a panel per setting."""
    _draw(grid, records, path, ["rounds"])


def draw_efficiency(grid: Grid, records: Sequence[Record], path: Path) -> None:
    """Draw accuracy against what was sent and what was computed, two panels per setting."""
    _draw(grid, records, path, ["bytes", "multiply_adds"])


def _draw(grid: Grid, records: Sequence[Record], path: Path, axes: Sequence[str]) -> None:
    groups = grouped([record for record in records if not record.diverged])
    settings = [s for s in grid.settings if any(key[0] == s for key in groups)]
    figure, panels = new_figure(len(settings) * len(axes))
    each = iter(panels)
    for setting in settings:
        for axis in axes:
            panel = next(each)
            title, place = AXES[axis]
            for i, (method, about) in enumerate(grid.methods(setting).items()):
                own = groups.get((setting, method))
                if own:
                    is_line = method in grid.content.get("lines", ())
                    (_reference if is_line else _band)(panel, own, place, about["label"], i)
            named = grid.settings[setting].get("label", setting)
            scale = "linear-linear" if axis == "rounds" else "log-linear"
            label(panel, named, title, "accuracy (%)", scale)
    save(figure, path)


def _style(i: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": STYLES[i // len(COLOURS) % len(STYLES)],
    }


def _band(
    panel: "Axes", own: Sequence[Record], place: Callable[[Mapping], float], name: str, i: int
) -> None:
    """Draw the mean over seeds, and its 95 % interval as a band."""
    points = list(zip(*(record.curve for record in own), strict=True))
    xs = [fmean(place(point) for point in same) for same in points]
    values = [[100 * point["metrics"][own[0].headline] for point in same] for same in points]
    means = [fmean(each) for each in values]
    panel.plot(xs, means, linewidth=1.2, label=name, **_style(i))
    if len(own) > 1:
        halves = [spread(each)[1] or 0.0 for each in values]
        low = [mean - half for mean, half in zip(means, halves, strict=True)]
        high = [mean + half for mean, half in zip(means, halves, strict=True)]
        panel.fill_between(xs, low, high, color=_style(i)["color"], alpha=0.15, linewidth=0)


def _reference(
    panel: "Axes", own: Sequence[Record], place: Callable[[Mapping], float], name: str, i: int
) -> None:
    """Draw where the full model ended."""
    end = fmean(100 * record.metrics[record.headline] for record in own)
    panel.axhline(end, linewidth=1, label=name, color=_style(i)["color"], linestyle="--")


def draw_costs(grid: Grid, records: Sequence[Record], path: Path) -> None:
    """Draw bars of multiply-adds and bytes relative to the baseline, the paper's beside them."""
    shares = shares_of(grid, records)
    settings = [s for s in grid.settings if any(share.setting == s for share in shares)]
    figure, panels = new_figure(max(1, len(settings)))
    for panel, setting in zip(panels, settings, strict=False):
        _bars(panel, grid, [share for share in shares if share.setting == setting])
        panel.set(title=grid.settings[setting].get("label", setting), ylabel="% of FedMBO's")
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
