"""Rounds of Dist-MAML on a GPU, and their kernels.

Usage: python -m benchmarks adaptation OUT.json (some minutes on an H200)
"""

import collections
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts.trial import trial_of
from rabo.runs.experiment import Experiment

CHANNELS = "32,64,128,256"
SETTINGS = {"20-way 5-shot": (20, 5), "20-way 1-shot": (20, 1), "5-way 5-shot": (5, 5)}
SETTINGS |= {"5-way 1-shot": (5, 1)}
OPTIONS = {"beta": 0.3, "adapt_rate": 5.0, "adapt_rate_x": 0.1, "num_inner_steps": 1}
ROUNDS, NAMED = 3, 14


def rounds(ways: int, shots: int) -> dict[str, Any]:
    """Time rounds after some that are not counted, then see what the kernels of one add up to."""
    options = {"backbone": "resnet12", "channels": CHANNELS, "ways": ways, "shots": shots}
    experiment = Experiment(
        task="few-shot",
        task_options={**options, **({"queries": 5} if ways == 20 else {})},
        algorithm="dist-maml",
        algorithm_options=OPTIONS,
        capacities="1",
        clients=10,
        device="cuda",
    )
    trial = trial_of(experiment)
    for _ in range(3):
        trial.round()
    took = milliseconds(trial.round, ROUNDS)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trial.round()
        torch.cuda.synchronize()
    total, number = collections.Counter[str](), collections.Counter[str]()
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            total[event.name] += event.device_time_total / 1000
            number[event.name] += 1
    return {
        "ms": round(took, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "kernels": sum(number.values()),
        "kernels_ms": round(sum(total.values()), 1),
        "most": [[name, number[name], round(ms, 1)] for name, ms in total.most_common(NAMED)],
    }


def milliseconds(work: Callable[[], Any], times: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / times


def main(out: str) -> None:
    found: dict[str, Any] = {
        "what": f"rounds of Dist-MAML: ResNet-12 of {CHANNELS} channels, ten clients, four tasks "
        "each, 5 steps, glyphs (means of 3 rounds, and of one more under a profiler the kernels "
        "that take most: name, number, ms)",
        "command": "python -m benchmarks adaptation OUT.json",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "rounds": {},
    }
    for name, (ways, shots) in SETTINGS.items():
        found["rounds"][name] = rounds(ways, shots)
        print(name, {k: v for k, v in found["rounds"][name].items() if k != "most"}, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
