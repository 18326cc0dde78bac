"""The page of results: written text with tables, figures and verdicts from the runs."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rabo.reproduction.equal_work import equal_work_table
from rabo.reproduction.estimators import estimators_table, read_rows
from rabo.reproduction.grid import describe, experiments_folder
from rabo.reproduction.quoted import quote
from rabo.reproduction.records import Record, cells_of
from rabo.reproduction.relative import shares_table
from rabo.reproduction.results import Results
from rabo.reproduction.table import markdown
from rabo.reproduction.targets import targets_table
from rabo.reproduction.tuning import candidates_table

TEMPLATE, REASONS = "page.md", "reasons.json"
PLACE = re.compile(r"^\{\{(\w+)(?: ([\w-]+))?\}\}$", re.MULTILINE)
NOTHING = "Not run yet."
MOST_VALUES = 4  # of an option that are told


def write_page(results: Path, path: Path, note: str = "") -> None:
    """Fill the template from what is below `results`."""
    text = note + fill((experiments_folder() / TEMPLATE).read_text(), results, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fill(template: str, out: Path, path: Path) -> str:
    """Replace {{table NAME}}, {{figure NAME}}, {{runs NAME}}, {{targets}} and quoted numbers."""
    results = Results(out)

    def made(place: re.Match[str]) -> str:
        what, name = place[1], place[2]
        if what == "targets":
            reasons = json.loads((experiments_folder() / REASONS).read_text())
            return targets_table(results, reasons)
        if what == "figure":
            return _figure(results, name, path)
        return _table(results, name) if what == "table" else _runs(results, name)

    text = quote(PLACE.sub(made, template), results)
    if "{{" in text:
        raise ValueError(f"{TEMPLATE} must quote cells, got {text[text.index('{{') :][:80]}")
    return text


def _table(results: Results, name: str) -> str:
    grid = results.grid(name)
    shows = grid.content["shows"]
    if shows == "estimators":
        rows = read_rows(grid, results.out)
        return estimators_table(grid, rows) if rows else NOTHING
    records = results.records(name)
    if not records:
        return NOTHING
    if shows == "tuning":
        return candidates_table(grid, records)
    if shows == "costs":
        return shares_table(grid, records)
    if shows == "efficiency":
        return equal_work_table(grid, records)
    return markdown(grid, cells_of(grid, records))


def _figure(results: Results, name: str, path: Path) -> str:
    figure = results.out / name / "figure.png"
    if not figure.exists():
        return NOTHING
    title = results.grid(name).content["title"]
    return f"![{title}]({os.path.relpath(figure, path.parent)})"


def _runs(results: Results, name: str) -> str:
    """Say how many runs there are, with which seeds, versions, rounds, devices and times."""
    if results.grid(name).content["shows"] == "estimators":
        paths = sorted((results.out / name).glob("seed-*.json"))
        return _facts([json.loads(path.read_text())["versions"] for path in paths], [])
    return _facts([], results.records(name))


def _facts(versions: Sequence[dict[str, str]], records: Sequence[Record]) -> str:
    if not versions and not records:
        return NOTHING
    found = [*versions, *(record.summary["versions"] for record in records)]
    software = dict.fromkeys(
        ", ".join(f"{k} {v}" for k, v in each.items() if k != "code") for each in found
    )
    facts = [f"Runs: {len(found)}", *software]
    if records:
        seeds = sorted({record.run.experiment.seed for record in records})
        facts.append(f"seeds {', '.join(map(str, seeds))}")
        for option in ("rounds", "clients", "capacities"):
            values = dict.fromkeys(str(record.config[option]) for record in records)
            facts += [f"{option} {' or '.join(values)}"] if len(values) <= MOST_VALUES else []
        shared = _shared([record.config["task_options"] for record in records])
        facts += [describe(shared)] if shared else []
        facts += dict.fromkeys(record.summary["device"] for record in records)
        times = [t for record in records if (t := record.summary["wall_seconds"])]
        facts += [f"{median(times):.0f} s a run (median wall time)"] if times else []
    return "; ".join(facts) + "."


def _shared(options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all runs have in common."""
    first = options[0]
    return {k: v for k, v in first.items() if all(each.get(k) == v for each in options)}
