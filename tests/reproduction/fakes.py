"""Folders of runs that were never run, with values to reason about."""

import json
from pathlib import Path

from rabo.reproduction.grid import Changes, Grid, Run


def fake_run(out: Path, run: Run, value: float, **changes) -> None:
    """Write what a run leaves behind that reached `value`."""
    folder = out / run.folder
    folder.mkdir(parents=True)
    headline = "balanced_accuracy" if run.experiment.task == "loss-tuning" else "accuracy"
    metrics = {headline: value, **changes.pop("metrics", {})}
    cost = {"multiply_adds": 100, "bytes_up": 30, "bytes_down": 10}
    summary = {
        "status": "finished",
        "headline": headline,
        "metrics": metrics,
        "cost": cost,
        "coverage": {"x_min": 1},
        "wall_seconds": 2.0,
        "device": "CPU",
        "versions": {"rabo": "0"},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(run.experiment.config()))
    (folder / "summary.json").write_text(json.dumps(summary))
    point = {"round": 1, "metrics": metrics, "spent": cost}
    (folder / "curve.jsonl").write_text(json.dumps(point) + "\n")


def fake_runs(out: Path, grid: Grid, values: dict[tuple[str, str], list[float]], **changes) -> None:
    """Write the seeds of some cells."""
    seeds = max(len(each) for each in values.values())
    for run in grid.runs(Changes(seeds=seeds)):
        own = values.get((run.setting, run.method), [])
        if run.experiment.seed < len(own):
            fake_run(out, run, own[run.experiment.seed], **changes)
