"""Time of competing functions, measured side by side."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """What all benchmarks share."""

    device: str = "cpu"
    repeats: int | None = None  # None: as many as the benchmark needs
    threads: int = 1
    quick: bool = False  # problems so small that their times mean nothing: to see that it runs
    backbone: str = "conv4"
    channels: str = ""  # of the backbone, if not as the task has them
    policy: str = "importance"
    clients: int = 10_000  # at most

    def clock(self) -> float:
        """CPU seconds of all threads so far; on a GPU, seconds when it has done all its work."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def interleave(
    contestants: Mapping[str, Callable[[], Any]], setting: Setting, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time every contestant in turn; the setting may say how often.

    Every turn starts with another contestant, so that a drift of the machine or what the one before
    left in the caches favours nobody; the collector of cycles runs between turns, not in them.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, setting.repeats or repeats):
        first = turn % len(names)
        gc.collect()
        gc.disable()
        for name in names[first:] + names[:first]:
            start = setting.clock()
            contestants[name]()
            seconds = setting.clock() - start
            if turn >= 0:
                times[name].append(seconds)
        gc.enable()
    return times


def milliseconds(times: Sequence[float]) -> float:
    return 1000 * statistics.median(times)


def ratio(times: Sequence[float], bar: Sequence[float]) -> float:
    """Return the median over turns of one contestant's time over another's."""
    return statistics.median(a / b for a, b in zip(times, bar, strict=True))
