"""CPU time of competing functions, measured side by side."""

import ctypes
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def prepare(keep_memory: bool = True) -> None:
    """Use one thread, and let the allocator keep what it has.

    glibc gives large blocks back to the system by rules that depend on what ran before; fetching
    them again is up to a quarter of the time of a convolutional net, and comes and goes by chance.
    It weighs more on wide models, so that keeping memory makes narrow ones look worse.
    """
    torch.set_num_threads(1)
    if keep_memory and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of one call, over all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def interleave(
    contestants: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time every contestant `repeats` times in turn.

    Every turn starts with another contestant, so that a drift of the machine or what the one before
    left in the caches favours nobody; the collector of cycles runs between calls, not in them.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            gc.disable()
            seconds = cpu_seconds(contestants[name])
            gc.enable()
            if turn >= 0:
                times[name].append(seconds)
    return times


def ratio(times: Sequence[float], bar: Sequence[float]) -> float:
    """Return the median over turns of one contestant's time over another's."""
    return statistics.median(a / b for a, b in zip(times, bar, strict=True))


def machine() -> dict[str, Any]:
    """Say what was measured on what."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of equal keys as a table in Markdown."""
    columns = list(rows[0])
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    print("| " + " | ".join(c.ljust(widths[c]) for c in columns) + " |")
    print("|" + "|".join("-" * (widths[c] + 2) for c in columns) + "|")
    for row in rows:
        print("| " + " | ".join(row[c].ljust(widths[c]) for c in columns) + " |")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
