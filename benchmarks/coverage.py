"""How many clients have trained an entry of x since a run began: C*_x is of one round alone.

Usage: python -m benchmarks coverage RUN OUT.json [ROUNDS [TASKS]] (the folder of a run, which is
done again on a CPU from its config.json; at the end every part of x that a client is given is
judged alone, on some test tasks; RABO_DATA)
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.submodels import FOREVER, alone
from rabo.exchange.state import Cohort, Cuts
from rabo.pruning.submodel import Part
from rabo.runs.experiment import recorded_experiment, versions
from rabo.tasks.adaptation import accuracy_interval

SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200)


def measure(run: Path, rounds: int, tasks: int) -> Iterator[dict[str, Any]]:
    """Yield, after some rounds, how many entries 0, 1, ... clients have trained so far.

    At the end also of the entries of every part alone, with the part's accuracy.
    """
    recorded = recorded_experiment(run, rounds=FOREVER, device="cpu")
    experiment = replace(recorded, rounds=rounds, evaluate_every=rounds)
    federation, setup = experiment.federation()
    judge: Any = federation.evaluate
    algorithm: Any = federation.algorithm
    widths: dict[int, Any] = {i: client.capacity for i, client in enumerate(setup.clients)}
    cohort = Cohort(federation.channels, widths)
    held: list[dict[str, Tensor]] = [{} for _ in widths]
    progress = federation.run(rounds)
    for done in range(1, rounds + 1):
        cuts = Cuts(algorithm.policy, federation.state, cohort, experiment.seed)
        for own, cut in zip(held, cuts.values(), strict=True):
            for name, kept in mask_of(cut.x, federation.state.x).items():
                own[name] = own.get(name, False) | kept
        next(progress)
        if done in SHOWN and done < rounds:
            yield {"round": done, "entries by clients": counts(held)}
    parts: dict[tuple[bytes, ...], dict[str, Any]] = {}
    for client, cut in Cuts(algorithm.policy, federation.state, cohort, experiment.seed).items():
        mask = mask_of(cut.x, federation.state.x)
        part = parts.setdefault(tuple(kept.numpy().tobytes() for kept in mask.values()), {})
        part.setdefault("clients", []).append(client)
        if "entries by clients" not in part:
            part["entries by clients"] = counts(held, mask)
            accuracies = judge.accuracies(*alone(cut, federation.state), tasks)
            part["accuracy"], part["interval"] = accuracy_interval(accuracies)
    yield {"round": rounds, "entries by clients": counts(held), "parts": list(parts.values())}


def mask_of(cut: Part, full: Any) -> dict[str, Tensor]:
    """Which entries a client holds."""
    kept = {name: torch.ones_like(part) for name, part in cut.extract(full).items()}
    return {name: mask.bool() for name, mask in cut.expand(kept).items()}


def counts(held: list[dict[str, Tensor]], within: dict[str, Tensor] | None = None) -> list[int]:
    """How many entries, of some or of all, 0, 1, ... clients have trained."""
    total = torch.zeros(len(held) + 1, dtype=torch.long)
    for name in held[0]:
        number = torch.stack([own[name] for own in held]).sum(0)
        chosen = number if within is None else number[within[name]]
        total += torch.bincount(chosen.flatten(), minlength=len(held) + 1)
    return total.tolist()


def main(run: str, out: str, rounds: str = "200", tasks: str = "100") -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"run": run, "versions": versions(), "tasks": int(tasks), "rounds": []}
    for reached in measure(Path(run), int(rounds), int(tasks)):
        found["rounds"].append(reached)
        for part in (reached, *reached.get("parts", [])):
            numbers = part["entries by clients"]
            shares = " ".join(f"{100 * n / sum(numbers):.1f}" for n in numbers)
            about = f"part of clients {part['clients']}" if "clients" in part else "all"
            score = f", accuracy {100 * part['accuracy']:.1f}" if "accuracy" in part else ""
            print(
                f"round {reached['round']}, {about}: % of entries that 0, 1, ... clients have "
                f"trained: {shares}{score}",
                flush=True,
            )
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
