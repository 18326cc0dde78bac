"""How many clients have trained an entry of x since a run began: C*_x is of one round alone.

Usage: python benchmarks/coverage.py RUN OUT.json [ROUNDS] (the folder of a run, which is done again
on a CPU from its config.json, without evaluations; RABO_DATA)
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rabo.algorithms.base import Cohort, Cuts
from rabo.experiment import recorded_experiment, versions

FOREVER = 10**9  # rounds: a run that has ended is read too
SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200)


def measure(run: Path, rounds: int) -> Iterator[tuple[int, list[int]]]:
    """Yield, after some rounds, how many entries 0, 1, ... clients have trained so far."""
    recorded = recorded_experiment(run, rounds=FOREVER, device="cpu")
    experiment = replace(recorded, rounds=rounds, evaluate_every=rounds)
    federation, setup = experiment.federation()
    algorithm: Any = federation.algorithm
    widths: dict[int, Any] = {i: client.capacity for i, client in enumerate(setup.clients)}
    cohort = Cohort(federation.channels, widths)
    held: dict[int, dict[str, Tensor]] = {client: {} for client in widths}
    progress = federation.run(rounds)
    for done in range(1, rounds + 1):
        cuts = Cuts(algorithm.policy, federation.state, cohort, experiment.seed)
        for client, cut in cuts.items():
            parts = cut.x.extract(federation.state.x)
            mask = cut.x.expand({name: torch.ones_like(part) for name, part in parts.items()})
            for name, kept in mask.items():
                held[client][name] = held[client].get(name, False) | kept.bool()
        next(progress)
        if done in SHOWN or done == rounds:
            yield done, _counts(list(held.values()))


def _counts(held: list[dict[str, Tensor]]) -> list[int]:
    total = torch.zeros(len(held) + 1, dtype=torch.long)
    for name in held[0]:
        number = sum(client[name].long() for client in held)
        total += torch.bincount(torch.as_tensor(number).flatten(), minlength=len(held) + 1)
    return total.tolist()


def main(run: str, out: str, rounds: str = "200") -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"run": run, "versions": versions(), "entries by clients": {}}
    for done, counts in measure(Path(run), int(rounds)):
        found["entries by clients"][str(done)] = counts
        shares = " ".join(f"{100 * n / sum(counts):.1f}" for n in counts)
        print(
            f"round {done}: % of entries that 0, 1, ... clients have trained: {shares}", flush=True
        )
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
