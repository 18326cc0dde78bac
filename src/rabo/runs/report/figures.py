"""Charts as plain data, as plotly reads them, and their HTML."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rabo.errors import needs

FEW_ROUNDS = 15  # an axis has room for a tick at each
BASE = {  # of every chart; the style sheet sets the colours of texts and grids
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12},
    "margin": {"l": 48, "r": 12, "t": 10, "b": 44},
    "legend": {"orientation": "h", "y": -0.22, "x": 0, "font": {"size": 11}},
    "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#1b1f24"}},
    "dragmode": False,
    "autosize": True,
    "height": 340,
}


class Chart(NamedTuple):
    """A figure, and its description for readers who do not see it."""

    title: str
    about: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


def html_of(chart: Chart, name: str) -> str:
    """Return the element of a chart with the script that draws it."""
    with needs("report", "reports"):
        from plotly.io import to_html
    figure = escaped({"data": chart.data, "layout": chart.layout})
    config = {"responsive": True, "displayModeBar": False}
    return to_html(
        figure, config, include_plotlyjs=False, full_html=False, validate=False, div_id=name
    )


def escaped(value: Any, key: str = "") -> Any:
    """Escape all texts of a figure: plotly reads HTML in them.

    A hover template keeps its tags, so it never contains a text of a file: such a text comes in
    as `%{meta}` or `%{text}`.
    """
    if isinstance(value, str):
        return value if key == "hovertemplate" else escape(value, quote=False)
    if isinstance(value, Mapping):
        return {k: escaped(each, k) for k, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [escaped(each, key) for each in value]
    return value


def layout_of(x: str, y: str, x_type: str = "linear", y_type: str = "linear") -> dict[str, Any]:
    """Return the layout of a chart with these axes."""
    return {**BASE, "xaxis": _axis(x, x_type), "yaxis": _axis(y, y_type)}


def _axis(title: str, kind: str) -> dict[str, Any]:
    formats = {"linear": "SI", "log": "power"}  # 2k, and 10⁻⁶ rather than 1µ
    numbers = {"exponentformat": formats[kind]} if kind in formats else {}
    return {"title": {"text": title}, "type": kind, "automargin": True, **numbers}


def layout_over_rounds(rounds: Iterable[float], y: str, y_type: str = "linear") -> dict[str, Any]:
    """Return a layout with ticks at whole rounds only; many rounds need no help for that."""
    layout = layout_of("rounds", y, y_type=y_type)
    if max(rounds, default=0) < FEW_ROUNDS:
        layout["xaxis"] |= {"tick0": 0, "dtick": 1}
    return layout


def words(name: str) -> str:
    """Return the name of a metric as words."""
    return name.replace("_", " ")


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
