"""Choose the settings of every method from as many candidates, on validation data."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rabo.reproduction.grid import Grid
from rabo.reproduction.records import Record, grouped, spread
from rabo.reproduction.table import not_run
from rabo.runs.checkpoint import write_atomically

HELD_OUT = ("validation", "aside")  # from what training data: what tuning may see


def choose(grid: Grid, records: Sequence[Record]) -> dict[str, Mapping[str, Any]]:
    """Return the best candidate of every method of which all have been run.

    The best has the highest mean of the headline over seeds; a candidate that diverged is none.
    """
    groups = grouped(records)
    chosen = {}
    for method in grid.settings:
        candidates = grid.methods(method)
        means = {name: _mean(groups.get((method, name), [])) for name in candidates}
        if all((method, name) in groups for name in candidates):
            best = max(means, key=lambda name: means[name])
            if means[best] > float("-inf"):
                chosen[method] = candidates[best]["run"]["algorithm_options"]
    return chosen


def _mean(records: Sequence[Record]) -> float:
    if not records or any(record.diverged for record in records):
        return float("-inf")
    mean, _, _ = spread([record.value for record in records])
    return float("-inf") if mean is None else mean


def check_validation(grid: Grid, records: Sequence[Record]) -> None:
    """Refuse runs that were judged on test data."""
    for record in records:
        judged_on = record.config["task_options"].get("held_out", "test")
        if judged_on not in HELD_OUT:
            raise ValueError(
                f"{record.run.name} must be judged on validation data (held_out one of "
                f"{', '.join(HELD_OUT)}), got held_out={judged_on}"
            )


def write_choice(grid: Grid, records: Sequence[Record], tuned: Path) -> dict[str, Any]:
    """Add what is chosen to the file that grids read."""
    check_validation(grid, records)
    chosen = choose(grid, records)
    if chosen:
        known = json.loads(tuned.read_text()) if tuned.exists() else {}
        family = grid.content["tuned"]
        known[family] = {**known.get(family, {}), **chosen}
        text = json.dumps(known, indent=2) + "\n"
        tuned.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(tuned, text.encode())
    return chosen


def candidates_table(grid: Grid, records: Sequence[Record]) -> str:
    """Return all candidates and what they reach on validation data, the chosen ones in bold."""
    groups, chosen = grouped(records), choose(grid, records)
    lines, waiting = ["| method | candidates, and what they reach |", "|---|---|"], []
    for method, about in grid.settings.items():
        told = []
        for name, candidate in grid.methods(method).items():
            options, own = candidate["run"]["algorithm_options"], groups.get((method, name), [])
            text = f"{candidate['label']}: {_reached(own)}"
            told.append(f"**{text}**" if chosen.get(method) == options else text)
        if any((method, name) in groups for name in grid.methods(method)):
            lines.append(f"| {about['label']} | {'<br>'.join(told)} |")
        else:
            waiting.append(about["label"])
    return "\n".join(lines + not_run(waiting))


def _reached(records: Sequence[Record]) -> str:
    if not records:
        return "not run yet"
    mean = _mean(records)
    return "diverged" if mean == float("-inf") else f"{mean:.2f}"
