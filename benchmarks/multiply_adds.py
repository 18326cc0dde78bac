"""Where the multiply-adds of a run go: features (convolutions) or the head, by phase.

Usage: python -m benchmarks multiply_adds OUT.json RUN ... (folders of few-shot runs; the first
round of each is done again on a CPU from its config.json, and its parts are weighed by what every
phase took in the whole run; RABO_DATA)
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.submodels import FOREVER
from rabo.exchange import cost as metering
from rabo.runs.experiment import recorded_experiment, versions


class Sorted(metering.Counter):
    """Counts convolutions apart from all else."""

    def __init__(self, held: int = 0):
        super().__init__(held)
        self.convolutions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.flops
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if "convolution" in func._overloadpacket.__name__:
            self.convolutions += self.flops - before
        return result


class SortingMeter(metering.Meter):
    """Adds up what every kind of work takes, over all clients."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[str, dict[str, int]] = defaultdict(lambda: {"features": 0, "head": 0})

    def run(self, key: Any, work: Callable[[], Any], held: int = 0) -> tuple[Any, metering.Cost]:
        with Sorted(held) as counter:
            result = work()
        own = self.spent[key[0]]
        own["features"] += counter.convolutions // 2
        own["head"] += (counter.flops - counter.convolutions) // 2
        return result, metering.Cost(counter.flops // 2, counter.peak, 0.0)


def measure(run: Path) -> dict[str, dict[str, int]]:
    """Do the first round and return its multiply-adds by phase."""
    recorded = recorded_experiment(run, rounds=FOREVER, device="cpu")
    options = {**recorded.task_options, "test_tasks": 1, "interim_tasks": 1}
    experiment = replace(recorded, rounds=1, evaluate_every=1, task_options=options)
    federation, _ = experiment.federation()
    runtime: Any = federation.ledger
    while not hasattr(runtime, "_meter"):  # what wraps it: checks, accounts
        runtime = runtime.runtime
    runtime._meter = meter = SortingMeter()
    for _ in federation.run(1):
        pass
    return dict(meter.spent)


def shares(run: Path, spent: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Return per cent of all that the run took."""
    by_phase = json.loads((run / "summary.json").read_text())["cost_by_phase"]
    total = sum(cost["multiply_adds"] for cost in by_phase.values())
    found = {}
    for phase, own in spent.items():
        weight = 100 * by_phase[phase]["multiply_adds"] / total / sum(own.values())
        found[phase] = {what: round(weight * number, 5) for what, number in own.items()}
    return found


def main(out: str, first: str, *others: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"versions": versions(), "per cent of a run": {}}
    for run in (first, *others):
        own = found["per cent of a run"][run] = shares(Path(run), measure(Path(run)))
        for phase, parts in own.items():
            told = ", ".join(f"{what} {share:.5f}" for what, share in parts.items())
            print(f"{run}, {phase}: {told}", flush=True)
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
