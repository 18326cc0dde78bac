"""Batch norm of few channels on a CPU: `rabo.models.kernels.row_norm` against the framework's.

Usage: OMP_NUM_THREADS=1 python -m benchmarks norms OUT.json (half a minute)
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rabo.models.kernels import row_norm

CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20)
IMAGES = ((95, 28), (60, 28), (95, 14), (59, 14), (95, 7))  # number and side
TIMES = 15


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the least CPU time of some turns."""
    work()
    least = float("inf")
    for _ in range(TIMES):
        start = time.process_time()
        work()
        least = min(least, time.process_time() - start)
    return round(1000 * least, 3)


def measure(number: int, channels: int, side: int) -> dict[str, Any]:
    """Time the norm and its slopes, both ways."""
    images = torch.randn(number, side, side, channels).permute(0, 3, 1, 2).requires_grad_()
    weight, bias = (torch.rand(channels).requires_grad_() for _ in range(2))
    towards = torch.randn(number, side, side, channels).permute(0, 3, 1, 2)
    given = [images, weight, bias]

    def both_ways(norm: Callable[[], torch.Tensor]) -> float:
        return milliseconds(lambda: torch.autograd.grad(norm(), given, towards))

    return {
        "images": number,
        "channels": channels,
        "side": side,
        "framework": both_ways(lambda: F.batch_norm(images, None, None, weight, bias, True)),
        "rows": both_ways(lambda: row_norm.normalise(images, weight, bias, 1e-5)),
        "is_used": row_norm.pays(images),
    }


def main(out: str) -> None:
    torch.set_num_threads(1)
    sizes = [(number, channels, side) for number, side in IMAGES for channels in CHANNELS]
    found = {
        "what": f"CPU milliseconds of a norm and its slopes, channels-last, the least of {TIMES}",
        "command": "OMP_NUM_THREADS=1 python -m benchmarks norms OUT.json",
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "rows": [measure(*size) for size in sizes],
    }
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
