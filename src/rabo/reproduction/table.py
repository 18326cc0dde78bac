"""Tables "paper / ours" as JSON, CSV and Markdown."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Cell

NOTE = (
    "{unit}: {what} with its 95 % interval, over seeds by Student's t or, where marked *, of one "
    "seed over test tasks. Of the entries that were ever trained; the full model's in brackets "
    "where some were not."
)


def write_tables(grid: Grid, cells: Sequence[Cell], out: Path, changed: str = "") -> None:
    """Write table.json, table.csv and table.md, with what was `changed` of what the grid says."""
    out.mkdir(parents=True, exist_ok=True)
    paper = grid.content.get("paper", {})
    content = {
        "title": grid.content["title"],
        "paper": paper.get("where", ""),
        **({"changed": changed} if changed else {}),
        "cells": [asdict(cell) for cell in cells],
    }
    (out / "table.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    with (out / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([field.name for field in fields(Cell)])
        rows.writerows(asdict(cell).values() for cell in cells)
    note = NOTE.format(
        unit="Per cent"
        if all("accuracy" in cell.headline for cell in cells)
        else "Per cent where it is an accuracy",
        what="the paper's number / ours" if paper.get("numbers") else "the mean",
    )
    note += f" Not as in the experiment's file: {changed}." if changed else ""
    (out / "table.md").write_text(f"{markdown(grid, cells)}\n\n{note}\n")


def markdown(grid: Grid, cells: Sequence[Cell]) -> str:
    """Return a row per method and a column per setting, or the other way round."""
    if not cells:
        return "Not run yet."
    found = {(cell.setting, cell.method): cell for cell in cells}
    methods = {m: own.get("label", m) for s in grid.settings for m, own in grid.methods(s).items()}
    lines = [["", *(own.get("label", s) for s, own in grid.settings.items())]]
    begun, waiting = {method for _, method in found}, []
    for method, label in methods.items():
        if method in begun:
            lines.append([label, *(_text(grid, found, s, method) for s in grid.settings)])
        else:
            waiting.append(label)
    if grid.content.get("rows") == "settings":
        lines = [list(line) for line in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join([f"| {' | '.join(line)} |" for line in lines] + not_run(waiting))


def not_run(labels: Sequence[str]) -> list[str]:
    """Return what is said below a table of rows that would be empty."""
    return ["", f"Not run yet: {'; '.join(labels)}."] if labels else []


def _text(grid: Grid, found: Mapping[tuple[str, str], Cell], setting: str, method: str) -> str:
    if method not in grid.methods(setting):
        return "–"
    return text_of(found.get((setting, method)), _paper(grid, setting, method))


def _paper(grid: Grid, setting: str, method: str) -> float | None:
    label = grid.methods(setting).get(method, {}).get("paper", "")
    return grid.content.get("paper", {}).get("numbers", {}).get(setting, {}).get(label)


def text_of(cell: Cell | None, paper: float | None) -> str:
    """Return what a table shows of a cell: paper / ours."""
    before = f"{paper:.2f} / " if paper is not None else ""
    if cell is None:
        return f"{before}not run yet"
    if cell.value is None:
        return f"{before}diverged"
    form = ".2f" if "accuracy" in cell.headline else ".2e"
    text = f"{before}**{cell.value:{form}}**"
    if cell.interval is not None:
        text += f" ± {cell.interval:{form}}{'*' if cell.interval_over != 'seeds' else ''}"
    if cell.full_model is not None and abs(cell.full_model - cell.value) > 5e-3:
        text += f" ({cell.full_model:.2f})"
    return text
