"""From the folders of runs to tables and figures: needs no run."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rabo.reproduction.drawing import draw_costs, draw_curves, draw_efficiency
from rabo.reproduction.equal_work import equal_work, equal_work_table
from rabo.reproduction.estimators import draw_estimators, estimators_table, read_rows
from rabo.reproduction.grid import Changes, Grid
from rabo.reproduction.records import cells_of, read_records
from rabo.reproduction.relative import shares_of, shares_table
from rabo.reproduction.table import write_tables
from rabo.reproduction.tuning import candidates_table, write_choice

FIGURES: Mapping[str, Callable[[Grid, Any, Path], None]] = {
    "curves": draw_curves,
    "efficiency": draw_efficiency,
    "costs": draw_costs,
}


def collect(grid: Grid, out: Path, tuned: Path, changes: Changes | None = None) -> list[str]:
    """Write what a grid shows below out/NAME, and say what was written."""
    if grid.content["shows"] == "estimators":
        return _collect_estimators(grid, out, changes)
    records, shown = read_records(grid, out, changes), out / grid.name
    shows = grid.content["shows"]
    if not records:
        return [f"{grid.name}: nothing was run yet in {out}"]
    write_tables(grid, cells_of(grid, records), shown, changes.told() if changes else "")
    said = [f"{grid.name}: {len(records)} runs, tables in {shown}"]
    if shows == "tuning":
        (shown / "table.md").write_text(candidates_table(grid, records) + "\n")
        chosen = write_choice(grid, records, tuned)
        said.append(f"{grid.name}: chosen for {', '.join(chosen) or 'no method yet'}, in {tuned}")
    if shows == "costs":
        shares = [share._asdict() for share in shares_of(grid, records)]
        (shown / "relative.json").write_text(json.dumps(shares, indent=1) + "\n")
        (shown / "table.md").write_text(shares_table(grid, records) + "\n")
        if not shares:  # nothing to compare with yet
            (shown / "figure.png").unlink(missing_ok=True)
            return said
    if shows == "efficiency":
        reached = [each._asdict() for each in equal_work(grid, records)]
        (shown / "equal_work.json").write_text(json.dumps(reached, indent=1) + "\n")
        (shown / "table.md").write_text(equal_work_table(grid, records) + "\n")
    if shows in FIGURES:
        said += _draw(grid, FIGURES[shows], records, shown)
    return said


def _draw(grid: Grid, draw: Callable[[Grid, Any, Path], None], found: Any, out: Path) -> list[str]:
    """Draw a figure where figures can be drawn, and say so where not."""
    try:
        draw(grid, found, out / "figure.png")
    except ImportError as error:
        return [f"{grid.name}: no figure: {error}"]
    return []


def _collect_estimators(grid: Grid, out: Path, changes: Changes | None) -> list[str]:
    rows, shown = read_rows(grid, out, changes), out / grid.name
    if not rows:
        return [f"{grid.name}: nothing was run yet in {out}"]
    (shown / "table.md").write_text(estimators_table(grid, rows) + "\n")
    with (shown / "table.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    said = [f"{grid.name}: {len(rows)} estimates, tables in {shown}"]
    return said + _draw(grid, draw_estimators, rows, shown)
