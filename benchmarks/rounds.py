"""Rounds of RABO by capacity: `python benchmarks/rounds.py`.

Two clients learn a backbone x under a linear head y, 5-way 1-shot on random 28x28 images. A round
is timed as the algorithm runs it: without the first calls, which are metered, without measuring
β, and without what a `Federation` adds for its accounts (a full-size probe, coverage).
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rabo import RABO, ConjugateGradient, Problem
from rabo.algorithms import Cohort
from rabo.ledger import Ledger
from rabo.models.convolutional import Conv4, ResNet12
from rabo.runtimes import InProcess
from timing import interleave, machine, prepare, print_table, ratio, write_json

CAPACITIES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
NUM_CLIENTS, NUM_WAYS, NUM_SHOTS = 2, 5, 1
TARGET = 0.45  # of a full round, for a round at half the width

BACKBONES: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "ResNet-12": lambda: (ResNet12(), 640),
    "Conv4": lambda: (Conv4(64), 64),
}


def few_shot(backbone: nn.Module, num_features: int) -> Problem:
    """Return the problem of one backbone, without data."""

    def inner(z: Tensor, y: Any, data: tuple[Tensor, Tensor]) -> Tensor:
        penalty = 0.01 * sum(w.square().sum() for w in y.values()) / 2
        return F.cross_entropy(y(z), data[1]) + penalty

    return Problem(
        inner=inner,
        outer=lambda z, y, data: F.cross_entropy(y(z), data[1]),
        features=lambda x, data: x(data[0]),
        x=backbone,
        y=nn.Linear(num_features, NUM_WAYS),
        example=torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)),
    )


def episode(num_images: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random images with `num_images` of each class."""
    labels = torch.arange(NUM_WAYS).repeat(num_images)
    return torch.randn(len(labels), 1, 28, 28, generator=generator), labels


def rounds_of(problem: Problem, num_queries: int) -> dict[float, Callable[[], Any]]:
    """Return, for every capacity, a round in which all clients have it."""
    generator = torch.Generator().manual_seed(1)
    clients = {
        client: problem.on(
            inner=episode(NUM_SHOTS, generator), outer=episode(num_queries, generator)
        )
        for client in range(NUM_CLIENTS)
    }
    algorithm = RABO(hypergradient=ConjugateGradient(num_iterations=10), beta=0.01)
    state = algorithm.init(clients[0])
    channels = clients[0].channels

    def round_at(capacity: float) -> Callable[[], Any]:
        cohort = Cohort(channels, dict.fromkeys(clients, capacity))
        ledger = Ledger(InProcess(clients))

        def work() -> Any:
            ledger.begin(state.x, state.y)
            return algorithm.round(state, cohort, ledger)

        return work

    return {capacity: round_at(capacity) for capacity in CAPACITIES}


def compare(name: str, num_queries: int, repeats: int) -> list[dict[str, Any]]:
    """Time rounds at all capacities in turn."""
    torch.manual_seed(0)
    rounds = rounds_of(few_shot(*BACKBONES[name]()), num_queries)
    work = {f"{capacity:g}": one for capacity, one in rounds.items()}
    times = interleave(work, repeats)
    return [
        {
            "backbone": name,
            "capacity": float(capacity),
            "milliseconds": 1000 * statistics.median(seconds),
            "ratio": ratio(seconds, times["1"]),
        }
        for capacity, seconds in times.items()
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--queries", type=int, default=15, help="per class")
    options.add_argument("--give-back", action="store_true", help="let glibc return memory")
    options.add_argument("--json", type=Path, default=Path("runs/benchmarks/rounds.json"))
    chosen = options.parse_args()
    prepare(keep_memory=not chosen.give_back)
    rows = [row for name in BACKBONES for row in compare(name, chosen.queries, chosen.repeats)]
    print_table(
        [
            {
                "backbone": row["backbone"],
                "capacity": f"{row['capacity']:g}",
                "CPU ms": f"{row['milliseconds']:.1f}",
                "x full": f"{row['ratio']:.3f}",
            }
            for row in rows
        ]
    )
    for row in rows:
        if row["capacity"] == 0.5:
            verdict = "within" if row["ratio"] <= TARGET else "beyond"
            print(f"{row['backbone']}: {row['ratio']:.3f} of a full round, {verdict} {TARGET}")
    settings = {k: v for k, v in vars(chosen).items() if k != "json"}
    write_json(chosen.json, {"machine": machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
