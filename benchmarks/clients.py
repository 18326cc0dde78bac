"""Rounds with many clients, each with data of its own and made when it is asked for.

Each number of clients runs in a fresh process, whose peak memory is measured. With the policy
`random` no two clients share a cut, and what grows is what the clients remember between the two
exchanges of a round: their own x.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parts.machine import Machine
from benchmarks.parts.report import Finding, Target
from benchmarks.parts.timing import Setting
from rabo.federation.clients import Client, OnDemand
from rabo.federation.federation import Federation
from rabo.federation.solve import make_algorithm
from rabo.problems.problem import Problem

ROOT = Path(__file__).parents[1]
NUMBERS = (10, 100, 1_000, 10_000)
WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
HIDDEN, FEATURES, CLASSES, ITEMS = 256, 64, 10, 16
TIME, MEMORY = 1.3, 1.1  # of those with ten clients


def measure(setting: Setting, machine: Machine) -> Finding:
    """Measure every number of clients in a process of its own."""
    most = 100 if setting.quick else setting.clients
    numbers = [number for number in NUMBERS if number <= most]
    rows = [_in_new_process(number, setting) for number in numbers]
    for row in rows:
        for name in ("ms per client", "peak MB"):
            row[f"x {name}"] = row[name] / rows[0][name]
    targets = [
        Target("largest time per client", max(row["x ms per client"] for row in rows), TIME),
        Target("largest peak memory", max(row["x peak MB"] for row in rows), MEMORY),
    ]
    note = f"policy {setting.policy}; memory of the whole process, server and clients"
    return Finding(rows, targets, [note])


def rounds_of(number: int, setting: Setting) -> dict[str, Any]:
    """Run some rounds in this process, and say what they took."""
    torch.set_num_threads(setting.threads)
    algorithm = make_algorithm("rabo", policy=setting.policy, beta=0.05, num_inner_steps=5)
    some = min(1.0, 5 / number)
    federation = Federation(clients(number, setting.device), algorithm, participation=some)
    list(federation.run(1))  # a few clients: what is loaded, measured and cached once
    federation.participation = 1.0
    before, start, rounds = _peak_megabytes(setting), setting.clock(), setting.repeats or 2
    for _ in federation.run(rounds):
        pass
    seconds, peak = setting.clock() - start, _peak_megabytes(setting)
    return {
        "clients": number,
        "ms per client": 1000 * seconds / rounds / number,
        "rounds per second": rounds / seconds,
        "peak MB": peak,
        "grown MB": peak - before,
    }


def clients(number: int, device: str) -> OnDemand:
    """Return clients that learn a representation x under a classifier y."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
    )

    def inner(z: Any, y: Any, data: Any) -> Any:
        return F.cross_entropy(y(z), data[1]) + 0.01 * y["weight"].square().sum()

    problem = Problem(
        inner=inner,
        outer=lambda z, y, data: F.cross_entropy(y(z), data[1]),
        features=lambda x, data: x(data[0]) / HIDDEN**0.5,
        x=backbone.to(device),
        y=nn.Linear(HIDDEN, CLASSES).to(device),
        example=torch.randn(4, FEATURES).to(device),
    )

    def make(client: int) -> Client:
        g = torch.Generator().manual_seed(client)
        parts = [
            (
                torch.randn(ITEMS, FEATURES, generator=g).to(device),
                torch.randint(CLASSES, (ITEMS,), generator=g).to(device),
            )
            for _ in range(2)
        ]
        own = problem.on(inner=parts[0], outer=parts[1])
        return Client(own, WIDTHS[client % len(WIDTHS)])

    return OnDemand(number, make)


def _in_new_process(number: int, setting: Setting) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.clients", str(number), json.dumps(setting)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise OSError(f"{number} clients failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _peak_megabytes(setting: Setting) -> float:
    """The most this process has held, on the device too."""
    on_device = torch.cuda.max_memory_allocated() if setting.device != "cpu" else 0
    return (peak_bytes() + on_device) / 1e6


def peak_bytes() -> int:
    """The most of this process that was in memory at a time.

    The system's usage record starts from what the parent had when it made this process; Linux also
    tells what is its own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [x for x in status.read_text().splitlines() if x.startswith("VmHWM")]
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measure the number of clients that the command line says, in this process."""
    print(json.dumps(rounds_of(int(sys.argv[1]), Setting(*json.loads(sys.argv[2])))))


if __name__ == "__main__":
    main()
