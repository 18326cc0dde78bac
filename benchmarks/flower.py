"""Seconds that Flower adds to a round of tiny clients: simulation and deployment, on this machine.

A round has the roll call and the two phases of RABO. The work itself is a few milliseconds; what a
round takes in one process is printed beside it.

Usage: python -m benchmarks flower
"""

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "flower"))
from trial import Simulation, Trial  # pyright: ignore[reportMissingImports]

from rabo.runs.experiment import Experiment

ROUNDS = 13
WARM = 2  # rounds in which processes start and build what they keep


def stamps(trial: Trial, out: Path, **config: object) -> list[float]:
    """Return when each round was written."""
    trial.begin(out, **config)
    times: list[float] = []
    metrics = out / "metrics.jsonl"
    while len(times) < ROUNDS:
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        times += [time.monotonic()] * (lines - len(times))
        time.sleep(0.02)
    return times


def report(name: str, times: list[float]) -> None:
    each = sorted(b - a for a, b in zip(times[WARM:-1], times[WARM + 1 :], strict=True))
    middle, last = each[len(each) // 2], each[-1]
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{name:<24} median {middle:.2f} s, slowest {last:.2f} s of {len(each)} rounds, {load}")


def main() -> None:
    task = {"task": "digits", "task_options": "width=16", "rounds": ROUNDS}
    task |= {"algorithm_options": "num_inner_steps=3", "evaluate_every": ROUNDS}
    plain, _ = Experiment(
        task="digits",
        task_options={"width": 16},
        algorithm_options={"num_inner_steps": 3},
        rounds=ROUNDS,
        evaluate_every=ROUNDS,
    ).federation()
    report("in process, 10 clients", [time.monotonic() for _ in plain.run(ROUNDS)])
    with tempfile.TemporaryDirectory() as folder, Simulation(Path(folder, "trial")) as trial:
        report("simulation, 10 clients", stamps(trial, Path(folder, "out"), **task, clients=10))
    with tempfile.TemporaryDirectory() as folder, Trial(Path(folder, "trial")) as trial:
        times = stamps(trial, Path(folder, "out"), **task)
        report("deployment, 3 nodes", times)
