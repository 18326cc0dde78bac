"""Heat maps of how many clients trained each channel."""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from rabo.runs.report.figures import Chart, layout_of, thinned
from rabo.runs.report.runs import Run, mapping, numbers

MOST_ROWS, MOST_COLUMNS = 300, 120
SEPARATOR = {"color": "rgba(128,128,128,0.9)", "width": 1}  # between layers


def coverage_charts(run: Run) -> list[Chart]:
    """Draw the number of clients that trained each channel, by layer and round."""
    charts = []
    for level in ("x", "y"):
        columns = [done for done in run.coverage if mapping(done, level)]
        if columns:
            charts.append(_channels(level, thinned(columns, MOST_COLUMNS)))
    return [chart for chart in charts if chart.data[0]["z"]]


def _channels(level: str, columns: Sequence[Mapping[str, Any]]) -> Chart:
    """Draw a row per channel, layer after layer; many channels share rows with neighbours."""
    layers = {
        name: len(counts)
        for name, counts in sorted(mapping(columns[-1], level).items(), key=_in_words_and_numbers)
        if isinstance(counts, list) and counts
    }
    size = max(1, ceil(sum(layers.values()) / MOST_ROWS))
    names, rows, middles, ends = [], [], [], []
    for layer, number_of in layers.items():
        first = len(rows)
        for start in range(0, number_of, size):
            stop = min(start + size, number_of)
            named = f"{start}" if stop - start == 1 else f"{start}–{stop - 1}"
            names.append(f"{_on(level, layer)}, channel {named}")
            counts = [mapping(done, level).get(layer) for done in columns]
            rows.append([_mean(each, start, stop, number_of) for each in counts])
        middles.append(names[(first + len(rows) - 1) // 2])
        ends.append(len(rows) - 0.5)
    cells = [cell for row in rows for cell in row if cell is not None]
    data = [
        {
            "type": "heatmap",
            "x": [done["round"] + 1 for done in columns],
            "y": names,
            "z": rows,
            "zmin": 0,
            "zmax": max([1.0, *cells]),
            "colorscale": "Viridis",
            "colorbar": {"title": {"text": "clients"}, "thickness": 12},
            "hovertemplate": "%{y}<br>round %{x}: %{z:.3g} clients<extra></extra>",
        }
    ]
    layout = layout_of("rounds", "", x_type="category", y_type="category")
    layout["xaxis"] |= {"nticks": 12}
    short = [_tail(_on(level, layer)) for layer in layers]
    layout["yaxis"] |= {
        "tickmode": "array",
        "tickvals": middles,
        "ticktext": short,
        "autorange": "reversed",
    }
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": SEPARATOR}
        for y in ends[:-1]
    ]
    layout["height"] = max(300, min(640, 140 + 2 * len(rows), 140 + 60 * len(layers)))
    about = f"Channels: {sum(layers.values())}, layers: {len(layers)}, evaluations: {len(columns)}"
    if cells:
        least, most = f"{min(cells):.3g}", f"{max(cells):.3g}"
        span = most if least == most else f"{least} to {most}"
        about += f"; trained by {span} client{'' if span == '1' else 's'} in a round"
    return Chart(f"who trained the channels of {level}", f"{about}.", data, layout)


def _on(level: str, layer: str) -> str:
    """Name the source of channels that begin at the other level."""
    other = {"x": "y.", "y": "x."}[level]
    return f"from {layer}" if layer.startswith(other) else layer


def _in_words_and_numbers(item: tuple[str, Any]) -> list[tuple[int, str]]:
    """Sort layer 2 before layer 10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", item[0])]


def _mean(counts: Any, start: int, stop: int, size: int) -> float | None:
    """Return the mean of some counts of a layer, None if a round does not have the layer."""
    if not isinstance(counts, list) or len(counts) != size:
        return None
    own = [v for v in numbers({"counts": counts[start:stop]}, "counts") if v is not None]
    return round(sum(own) / len(own), 2) if own else None


def _tail(name: str) -> str:
    return name if len(name) <= 16 else f"…{name[-15:]}"
