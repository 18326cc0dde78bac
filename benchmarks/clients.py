"""Rounds with many clients: `python benchmarks/clients.py`.

Every client has its own data and is made when it is asked for. Each number of clients runs in a
fresh process, whose peak memory is measured. With `--policy random` no two clients share a cut, and
what grows is what the clients remember between the two exchanges of a round: their own x.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rabo
from rabo.solve import make_algorithm
from timing import machine, prepare, print_table, write_json

NUMBERS = (10, 100, 1_000, 10_000)
WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
HIDDEN, FEATURES, CLASSES, ITEMS = 256, 64, 10, 16


def clients(number: int) -> rabo.OnDemand:
    """Return clients that learn a representation x under a classifier y."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
    )

    def inner(z: Any, y: Any, data: Any) -> Any:
        return F.cross_entropy(y(z), data[1]) + 0.01 * y["weight"].square().sum()

    problem = rabo.Problem(
        inner=inner,
        outer=lambda z, y, data: F.cross_entropy(y(z), data[1]),
        features=lambda x, data: x(data[0]) / HIDDEN**0.5,
        x=backbone,
        y=nn.Linear(HIDDEN, CLASSES),
        example=torch.randn(4, FEATURES),
    )

    def make(client: int) -> rabo.Client:
        g = torch.Generator().manual_seed(client)
        parts = [
            (
                torch.randn(ITEMS, FEATURES, generator=g),
                torch.randint(CLASSES, (ITEMS,), generator=g),
            )
            for _ in range(2)
        ]
        own = problem.on(inner=parts[0], outer=parts[1])
        return rabo.Client(own, WIDTHS[client % len(WIDTHS)])

    return rabo.OnDemand(number, make)


def measure(number: int, rounds: int, policy: str) -> dict[str, float]:
    """Run some rounds in this process, and say what they took."""
    prepare(keep_memory=False)
    options = {"policy": policy, "beta": 0.05, "num_inner_steps": 5}
    algorithm = make_algorithm("rabo", **options)
    federation = rabo.Federation(clients(number), algorithm, participation=min(1.0, 5 / number))
    list(federation.run(1))  # a few clients: what is loaded, measured and cached once
    federation.participation = 1.0
    before = _peak_bytes()
    start = time.process_time()
    for _ in federation.run(rounds):
        pass
    seconds = time.process_time() - start
    return {
        "clients": number,
        "CPU ms per client and round": 1000 * seconds / rounds / number,
        "peak megabytes": _peak_bytes() / 1e6,
        "grown megabytes": (_peak_bytes() - before) / 1e6,
    }


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument(
        "--policy", default="importance", help="importance (cuts are shared), or random"
    )
    options.add_argument("--one", type=int, help="measure this number of clients, print JSON")
    options.add_argument("--json", type=Path, default=Path("runs/benchmarks/clients.json"))
    chosen = options.parse_args()
    if chosen.one:
        print(json.dumps(measure(chosen.one, chosen.rounds, chosen.policy)))
        return
    rows = []
    for number in NUMBERS:
        command = [sys.executable, __file__, "--one", str(number), "--policy", chosen.policy]
        done = subprocess.run(
            [*command, "--rounds", str(chosen.rounds)], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    first = rows[0]
    for row in rows:
        for name in ("CPU ms per client and round", "peak megabytes"):
            row[f"x {name}"] = row[name] / first[name]
    print_table([{k: f"{v:.4g}" for k, v in row.items()} for row in rows])
    write_json(chosen.json, {"machine": machine(), "policy": chosen.policy, "rows": rows})


if __name__ == "__main__":
    main()
