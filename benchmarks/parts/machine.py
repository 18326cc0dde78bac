"""What a machine can do at best, and how close a piece of work comes to it."""

import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.parts.timing import Setting, interleave
from rabo.exchange.cost import Counter
from rabo.runs.experiment import versions
from rabo.tree import leaves


class Machine(NamedTuple):
    """Rates measured in the run they are compared with."""

    facts: dict[str, Any]
    flops: float  # of large matrix products, in bfloat16 on a GPU and float32 on a CPU, per second
    bandwidth: float  # bytes read and written by a large copy, per second

    def floors(self, work: Callable[[], Any]) -> dict[str, float]:
        """Milliseconds that work takes at least: operations over rate, bytes over bandwidth."""
        with Counter() as counter, Traffic() as traffic:
            work()
        return {
            "operations floor ms": 1000 * counter.flops / self.flops,
            "bytes floor ms": 1000 * traffic.num_bytes / self.bandwidth,
        }


class Traffic(TorchDispatchMode):
    """Counts the bytes that kernels must read and write: their inputs and outputs, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = _storages((args, kwargs or {}))
        written = _storages(result)
        if func._schema.is_mutable or not written.keys() <= read.keys():  # else it is only a view
            self.num_bytes += sum(read.values()) + sum(written.values())
        return result


def _storages(tree: Any) -> dict[int, int]:
    """The bytes of each tensor, by where it lies."""
    return {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in leaves(tree)}


def measure_machine(setting: Setting) -> Machine:
    """Measure the best rates of one device with as many threads as the benchmark has.

    What a GPU multiplies fastest here are images of wide backbones, in bfloat16.
    """
    on_gpu = setting.device != "cpu"
    size, length = (64, 2**16) if setting.quick else (8192 if on_gpu else 2048, 2**26)
    a, b = torch.rand(2, size, size, device=setting.device).to(
        torch.bfloat16 if on_gpu else torch.float32
    )
    source = torch.rand(length, device=setting.device)
    into, product = torch.empty_like(source), torch.empty_like(a)
    work: dict[str, Callable[[], Tensor]] = {
        "product": lambda: torch.mm(a, b, out=product),
        "copy": lambda: into.copy_(source),
    }
    best = {name: min(times) for name, times in interleave(work, setting, 7).items()}
    flops, bandwidth = 2 * size**3 / best["product"], 8 * length / best["copy"]
    facts = {
        **versions(),
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "clock": "seconds, when the device is done" if on_gpu else "CPU seconds of all threads",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "Gflop/s of a matrix product": flops / 1e9,
        "GB/s of a copy": bandwidth / 1e9,
    }
    return Machine(facts, flops, bandwidth)


def _processor() -> str:
    """The name of the processor, where the system tells."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
