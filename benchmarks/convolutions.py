"""Convolutions of few channels on a GPU: own kernels against torch's.

Usage: python -m benchmarks convolutions OUT.json (a minute on an H200, most of it to compile)
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rabo.models.kernels.narrow_convolution import _back, _convolve, _of_weight

WIDTHS = ("32,64,128,256", "16,32,64,128", "8,16,32,64", "4,8,16,32", "2,4,8,16", "4,10,20,40")
SIDES = (28, 14, 7, 3)
IMAGES, MOST, TIMES = 400, 32, 20  # four tasks of 100 images; channels that are looked at


def layers() -> Iterator[tuple[int, int, int, int]]:
    """Give the convolutions of ResNet-12: channels, side of the images, and of the window."""
    for widths in WIDTHS:
        before = 1
        for side, width in zip(SIDES, map(int, widths.split(",")), strict=True):
            yield from ((before, width, side, 3), (width, width, side, 3), (before, width, side, 1))
            before = width


def microseconds(work: Callable[[], Any]) -> float:
    """Time work as part of a CUDA graph, without its launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(TIMES):
            work()
    graph.replay()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    ends[0].record()
    graph.replay()
    ends[1].record()
    torch.cuda.synchronize()
    return round(1000 * ends[0].elapsed_time(ends[1]) / TIMES, 1)


def measure(channels: int, out: int, side: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time the way forwards, back to the images, and back to the weights."""
    images = torch.randn(IMAGES, side, side, channels, device="cuda", dtype=dtype)
    slope = torch.randn(IMAGES, side, side, out, device="cuda", dtype=dtype)
    images, slope = images.permute(0, 3, 1, 2), slope.permute(0, 3, 1, 2)
    weight = torch.randn(out, channels, size, size, device="cuda")
    laid, pad = weight.to(dtype, memory_format=torch.channels_last), [size // 2] * 2
    rest = (None, [1, 1], pad, [1, 1], False, [0, 0], 1)
    back = torch.ops.aten.convolution_backward
    return {
        "channels": [channels, out],
        "side": side,
        "window": size,
        "precision": str(dtype).removeprefix("torch."),
        "framework": [
            microseconds(lambda: F.conv2d(images, laid, padding=pad)),
            microseconds(lambda: back(slope, images, laid, *rest, [True, False, False])),
            microseconds(lambda: back(slope, images, laid, *rest, [False, True, False])),
        ],
        "narrow": [
            microseconds(lambda: _convolve(images, weight)),
            microseconds(lambda: _back(slope, weight)),
            microseconds(lambda: _of_weight(slope, images, weight)),
        ],
    }


def main(path: str) -> None:
    found: dict[str, Any] = {
        "what": f"microseconds of a convolution of {IMAGES} images, channels-last: forwards, back "
        "to the images, back to the weights (for the framework without what lays weights out)",
        "command": "python -m benchmarks convolutions OUT.json",
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "rows": [],
    }
    for channels, out, side, size in dict.fromkeys(layers()):
        for dtype in (torch.float32, torch.bfloat16)[: 2 if out >= 16 else 1]:
            if max(channels, out) <= MOST:
                found["rows"].append(measure(channels, out, side, size, dtype))
                print(found["rows"][-1], flush=True)
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
