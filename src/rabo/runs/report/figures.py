"""What all charts of a report share. Charts are plain data, as plotly reads them.

Every text that comes from a file is escaped: plotly reads some HTML in texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

# distinct for all eyes, on light and on dark
COLOURS = ("#0077bb", "#ee7733", "#009988", "#cc3311", "#aa4499", "#bba500", "#7a7a7a")

FEW_ROUNDS = 15  # fewer than the ticks an axis has place for


class Chart(NamedTuple):
    """A figure, and what to say of it to those who do not see it."""

    title: str
    about: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


def plain(text: str) -> str:
    """Escape a text of a file."""
    return escape(text, quote=False)


def layout_of(x: str, y: str, x_type: str = "linear", y_type: str = "linear") -> dict[str, Any]:
    return {"xaxis": _axis(x, x_type), "yaxis": _axis(y, y_type), "height": 340}


def _axis(title: str, kind: str) -> dict[str, Any]:
    written = {"linear": "SI", "log": "power"}  # 2k, and 10⁻⁶ rather than 1µ
    numbers = {"exponentformat": written[kind]} if kind in written else {}
    return {"title": {"text": plain(title)}, "type": kind, "automargin": True, **numbers}


def layout_over_rounds(rounds: Iterable[float], y: str, y_type: str = "linear") -> dict[str, Any]:
    """Put ticks at whole rounds; where rounds are many, they are there anyway."""
    layout = layout_of("rounds", y, y_type=y_type)
    if max(rounds, default=0) < FEW_ROUNDS:
        layout["xaxis"] |= {"tick0": 0, "dtick": 1}
    return layout


def words(name: str) -> str:
    return name.replace("_", " ")


def count_of(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Return all, or so many evenly among them, the first and the last included."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
