"""Rounds of Dist-MAML on a GPU, their kernels, and convolutions of tasks with their own weights.

Usage: python -m benchmarks adaptation OUT.json (about three minutes on an H200)
RABO_KERNELS=reference has torch's layers in place of `rabo.models.adapted`.
"""

import collections
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts.trial import trial_of
from rabo.runs.experiment import Experiment

CHANNELS = "32,64,128,256"
SETTINGS = {"20-way 5-shot": (20, 5), "20-way 1-shot": (20, 1), "5-way 5-shot": (5, 5)}
SETTINGS |= {"5-way 1-shot": (5, 1)}
OPTIONS = {"beta": 0.3, "adapt_rate": 5.0, "adapt_rate_x": 0.1, "num_inner_steps": 1}
LAYERS = [(1, 32, 28), (32, 32, 28), (32, 64, 14), (64, 64, 14)]
LAYERS += [(64, 128, 7), (128, 128, 7), (128, 256, 3), (256, 256, 3)]
TASKS = {"4 tasks of 100 images": (4, 100), "40 tasks of 5 images": (40, 5)}
PLAIN = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # 3x3, as large as the images
ROUNDS, CALLS, NAMED = 3, 20, 14


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


def convolutions() -> Iterator[dict[str, Any]]:
    """Time a convolution and both of its slopes, own kernels and the framework's task by task."""
    from rabo.models.adapted.convolution import _sums, _window

    back = torch.ops.aten.convolution_backward
    for name, (tasks, images) in TASKS.items():
        for channels, out, side in LAYERS:
            x, s = (
                torch.randn(tasks, images, side, side, c, device="cuda").permute(0, 1, 4, 2, 3)
                for c in (channels, out)
            )
            w = torch.randn(tasks, 3, 3, channels, out, device="cuda").permute(0, 4, 3, 1, 2)
            laid = [each.contiguous(memory_format=torch.channels_last) for each in w]
            parts = list(zip(s, x, laid, strict=True))
            work = {
                "own": (
                    lambda x=x, w=w: _window(x, w, False),
                    lambda s=s, w=w: _window(s, w, True),
                    lambda s=s, x=x: _sums(s, x, 3, True),
                ),
                "by_task": (
                    lambda parts=parts: [F.conv2d(i, v, padding=1) for _, i, v in parts],
                    lambda parts=parts: [back(*p, *PLAIN, [True, False, False]) for p in parts],
                    lambda parts=parts: [back(*p, *PLAIN, [False, True, False]) for p in parts],
                ),
            }
            us = {
                kind: [round(replayed(each), 1) for each in works] for kind, works in work.items()
            }
            yield {"tasks": name, "channels": [channels, out], "side": side, **us}


def replayed(work: Callable[[], Any]) -> float:
    """Return the microseconds of a recording."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    return 1000 * milliseconds(graph.replay, 1) / CALLS


def main(out: str) -> None:
    found: dict[str, Any] = {
        "what": f"rounds of Dist-MAML: ResNet-12 of {CHANNELS} channels, ten clients, four tasks "
        "each, 5 steps, glyphs (means of 3 rounds, and of one more under a profiler the kernels "
        "that take most: name, number, ms); then microseconds of convolutions of tasks with "
        "weights of their own, for the images, their slopes and those of weights",
        "command": "python -m benchmarks adaptation OUT.json",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "rounds": {},
        "convolutions": [],
    }
    for name, (ways, shots) in SETTINGS.items():
        found["rounds"][name] = rounds(ways, shots)
        print(name, {k: v for k, v in found["rounds"][name].items() if k != "most"}, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    for row in convolutions():
        found["convolutions"].append(row)
        print(row, flush=True)
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
