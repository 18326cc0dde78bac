"""What a benchmark found, as tables and as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Target(NamedTuple):
    """What should hold of a ratio."""

    what: str
    value: float
    limit: float

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.limit else "missed"
        return f"{self.what}: {self.value:.3f}, at most {self.limit:g}: {verdict}"


class Finding(NamedTuple):
    """Rows with the same columns, what they should show, and what a reader must know."""

    rows: Sequence[Row]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        lines = [table(self.rows), "", *map(str, self.targets), *self.notes]
        return "\n".join(lines)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        targets = [{**t._asdict(), "met": t.value <= t.limit} for t in self.targets]
        content = {**about, "rows": self.rows, "targets": targets, "notes": self.notes}
        path.write_text(json.dumps(content, indent=2) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    small = value != 0 and abs(value) < 0.001
    return f"{value:.1e}" if small else f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
