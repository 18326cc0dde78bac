"""Accuracy of the submodels that clients train, each alone: all other channels are 0.

Usage: python -m benchmarks submodels RUN [TASKS] (the folder of a few-shot run of RABO or RAFBO,
judged on the test tasks of that run as it stands in its last checkpoint; RABO_DATA)
"""

from pathlib import Path
from typing import Any

import torch

from rabo.exchange.state import Cohort, Cuts
from rabo.runs.checkpoint import Checkpoints
from rabo.runs.experiment import recorded_experiment
from rabo.tasks.adaptation import accuracy_interval
from rabo.tree import Params

FOREVER = 10**9  # rounds: a run that has ended is read too


def measure(run: Path, tasks: int) -> dict[str, tuple[float, float]]:
    """Judge the full model, and what clients would train in the next round: by name, once each."""
    experiment = recorded_experiment(run, rounds=FOREVER)
    federation, setup = experiment.federation()
    found = Checkpoints(run, experiment.identity()).latest(federation.state, print)
    if found is None:
        raise SystemExit(f"{run} has no checkpoint")
    judge: Any = federation.evaluate
    algorithm: Any = federation.algorithm
    state = found.state
    widths: dict[int, Any] = {i: client.capacity for i, client in enumerate(setup.clients)}
    cuts = Cuts(algorithm.policy, state, Cohort(federation.channels, widths), experiment.seed)
    models: dict[str, tuple[Params, Params]] = {"full model": (state.x, state.y)}
    for client, cut in cuts.items():
        x, y = alone(cut, state)
        if not any(all(torch.equal(x[k], other[k]) for k in x) for other, _ in models.values()):
            models[f"client {client}, width {widths[client]:.4g}"] = x, y
    return {
        name: accuracy_interval(judge.accuracies(x, y, tasks)) for name, (x, y) in models.items()
    }


def alone(cut: Any, state: Any) -> tuple[Params, Params]:
    """What a client holds, with zeros elsewhere."""
    both = ((cut.x, state.x), (cut.y, state.y))
    x, y = (part.expand(part.extract(full)) for part, full in both)
    return x, y


def main(run: str, tasks: str = "100") -> None:
    torch.set_num_threads(1)
    for name, (mean, interval) in measure(Path(run), int(tasks)).items():
        print(f"{name}: {100 * mean:.1f} ± {100 * interval:.1f}", flush=True)
