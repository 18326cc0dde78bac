"""Records that no run has made, with values to reason about."""

from experiments.grid import Grid
from experiments.records import Record, add_record

CURVE = {
    "round": [10, 20, 30],
    "accuracy": [0.2, 0.4, 0.8],
    "interval": [0.02, 0.03, 0.01],
    "multiply_adds": [100, 200, 300],
    "bytes_up": [10, 20, 30],
    "bytes_down": [30, 60, 90],
}


def record(setting, method, seed, value, work=300, metrics=None, **changes):
    """Return a finished run that reached a value."""
    return Record(
        {
            "setting": setting,
            "method": method,
            "seed": seed,
            "status": "finished",
            "headline": "accuracy",
            "metrics": {"accuracy": value, **(metrics or {})},
            "cost": {"multiply_adds": work, "bytes_up": 30, "bytes_down": 90},
            "coverage": {"x_min": 1},
            "curve": CURVE,
            **changes,
        }
    )


def write_runs(path, grid: Grid, value=0.5, seeds=1):
    """Write a runs.jsonl in which all runs of a grid have reached the same value."""
    from experiments.grid import Changes

    for run in grid.runs(Changes(seeds=seeds)):
        config = run.experiment.config()
        add_record(path, record(run.setting, run.method, run.seed, value, config=config))
