"""From the folders of runs to tables and figures: needs no run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rabo.reproduction.drawing import draw_costs, draw_curves, draw_efficiency
from rabo.reproduction.grid import Grid
from rabo.reproduction.records import cells_of, read_records
from rabo.reproduction.relative import shares_of, shares_table
from rabo.reproduction.table import write_tables
from rabo.reproduction.tuning import candidates_table, write_choice

FIGURES: Mapping[str, Callable[[Grid, Any, Path], None]] = {
    "curves": draw_curves,
    "efficiency": draw_efficiency,
    "costs": draw_costs,
}


def collect(grid: Grid, out: Path, tuned: Path) -> list[str]:
    """Write what a grid shows below out/NAME, and say what was written."""
    records, shown = read_records(grid, out), out / grid.name
    shows = grid.content["shows"]
    if not records:
        return [f"{grid.name}: nothing was run yet"]
    write_tables(grid, cells_of(grid, records), shown)
    said = [f"{grid.name}: {len(records)} runs, tables in {shown}"]
    if shows == "tuning":
        (shown / "table.md").write_text(candidates_table(grid, records) + "\n")
        chosen = write_choice(grid, records, tuned)
        said.append(f"{grid.name}: chosen for {', '.join(chosen) or 'no method yet'}, in {tuned}")
    if shows == "costs":
        shares = [share._asdict() for share in shares_of(grid, records)]
        (shown / "relative.json").write_text(json.dumps(shares, indent=1) + "\n")
        (shown / "table.md").write_text(shares_table(grid, records) + "\n")
    if shows in FIGURES:
        try:
            FIGURES[shows](grid, records, shown / "figure.png")
        except ImportError as error:
            said.append(f"{grid.name}: no figure: {error}")
    return said
