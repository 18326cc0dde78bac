"""Accuracy of Table 1's tasks on the backbone that training starts from: what learning must beat.

Usage: python -m benchmarks untrained DATA_ROOT OUT.json (it took 52 minutes on a busy core)
"""

import json
from pathlib import Path
from typing import Any

from rabo.runs.experiment import Experiment, versions
from rabo.tasks.adaptation import accuracy_interval

SETTINGS = [(5, 1), (5, 5), (20, 1), (20, 5)]


def measure(data_root: str, ways: int, shots: int, tasks: int = 600) -> dict[str, float]:
    """Let heads adapt to test tasks, on the features of seed 0 as they are drawn."""
    options = {"dataset": "omniglot", "data_root": data_root, "channels": "32,64,128,256"}
    experiment = Experiment(
        task="few-shot",
        algorithm="rabo",
        clients=10,
        device="cpu",
        task_options={**options, "ways": ways, "shots": shots},
    )
    federation, _ = experiment.federation()
    judge: Any = federation.evaluate
    x, y = judge.problem.definition.params
    mean, interval = accuracy_interval(judge.accuracies(x, y, tasks))
    return {"accuracy": mean, "interval": interval}


def main(data_root: str, out: str) -> None:
    found: dict[str, Any] = {"versions": versions(), "seed": 0}
    for ways, shots in SETTINGS:
        name = f"{ways}-way-{shots}-shot"
        found[name] = measure(data_root, ways, shots)
        print(name, found[name], flush=True)
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
