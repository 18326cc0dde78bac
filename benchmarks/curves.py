"""Accuracy of RABO on validation alphabets, round by round, on the path a runtime takes.

Usage: python -m benchmarks curves OUT.json SEED [RUNTIME] (20 seconds on an H200)
"""

import json
import sys
import time
from pathlib import Path

import torch

from benchmarks.rounds import CAPACITIES
from rabo.runs.experiment import Experiment

ROUNDS, EVERY = 60, 10


def main(out: str, seed: str, runtime: str = "auto") -> None:
    experiment = Experiment(
        task="few-shot",
        task_options={
            "dataset": "omniglot",
            "channels": "32,64,128,256",
            "held_out": "validation",
            "test_tasks": 200,
        },
        clients=10,
        capacities=CAPACITIES,
        rounds=ROUNDS,
        seed=int(seed),
        evaluate_every=EVERY,
        device="cuda",
        runtime=runtime,
    )
    start = time.perf_counter()
    federation, _ = experiment.federation()
    judged = [done for done in federation.run(ROUNDS) if "accuracy" in done.metrics]
    curve = [[r.round + 1, r.metrics["accuracy"], r.metrics["interval"]] for r in judged]
    found = {
        "command": f"python -m benchmarks curves OUT.json {seed} {runtime}",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "seconds": round(time.perf_counter() - start, 1),
        "curve": curve,
    }
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
    print(seed, [round(value, 3) for _, value, _ in curve], found["seconds"], flush=True)
