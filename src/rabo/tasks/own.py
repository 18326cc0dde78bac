"""A problem of your own: one Python file that says what each client has."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Annotated, ClassVar, cast

import torch

from rabo.algorithms import State
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client, OnDemand
from rabo.federation.ledger import Ledger
from rabo.problems.bilevel import BilevelProblem
from rabo.seeding import seed_of, seeded_layers, stream
from rabo.tasks.base import Setup

OUTER_LOSS = "outer_loss"


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """Solve the problem of a Python file with `problem(partition, num_partitions)`.

    It returns a `Problem` bound to the data of one client. Where a server has no data, the file
    also has `template()`, the same problem on none. `evaluate(x, y)`, if there, returns numbers.
    `headline = "accuracy"` names the number to compare runs by, and `falls = True` says that
    smaller is better. Without it, the clients' mean outer loss is the headline, or their mean loss
    if the problem has one loss.
    """

    example: ClassVar[str] = "--file problem.py --clients 3 --rounds 20"

    file: Annotated[str, "Python file with problem(partition, num_partitions)"]

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        module = _load(Path(self.file))
        headline = getattr(module, "headline", OUTER_LOSS)

        def evaluate(state: State, ledger: Ledger) -> dict[str, float]:
            found = module.evaluate(state.x, state.y) if hasattr(module, "evaluate") else {}
            if headline not in (OUTER_LOSS, *found):
                raise ValueError(
                    f"evaluate in {self.file} must return the headline {headline!r}, "
                    f"got {', '.join(found) or 'nothing'}"
                )
            return {name: float(value) for name, value in found.items()}

        def evaluate_here(state: State, ledger: Ledger) -> dict[str, float]:
            found = evaluate(state, ledger)
            return found if headline in found else {**found, OUTER_LOSS: mean_loss(state)}

        def mean_loss(state: State) -> float:
            problems = (client(i).problem for i in range(len(capacities)))
            return fmean(_outer_loss(p, state, seed, i) for i, p in enumerate(problems))

        @cache
        def client(index: int) -> Client:  # a machine has the data of its own alone
            return Client(module.problem(index, len(capacities)), capacities[index])

        return Setup(
            OnDemand(len(capacities), client),
            evaluate,
            headline,
            options={"outer_step": "adam"},
            falls=getattr(module, "falls", headline == OUTER_LOSS),
            template=getattr(module, "template", None),
            evaluate_here=evaluate_here,
        )


def _outer_loss(problem: BilevelProblem, state: State, seed: int, client: int) -> float:
    """Return f_i(x, y) of the full model, on the same data in every round; g_i if it is alone."""
    whole = getattr(problem, "whole", None)  # None if the problem samples batches itself
    batch = whole or problem.batch(stream(seed, client, OUTER_LOSS))
    is_alone = getattr(problem, "has_one_loss", False)
    loss, part = (problem.inner, batch.inner) if is_alone else (problem.outer, batch.outer)
    tensors = [*state.x.values(), *state.y.values()]
    with torch.no_grad(), seeded_layers(seed_of(seed, client, OUTER_LOSS), tensors):
        return float(loss(problem.features(state.x, part), state.y, part))


def clients_in(path: Path, number: int) -> Sequence[Client]:
    """Return the clients that a Python file defines: its list `clients`, or `number` problems."""
    module = _import(path)
    if hasattr(module, "clients"):
        return module.clients
    make = _problem_of(module, path, " or a list named clients")
    return [Client(make(i, number)) for i in range(number)]


def _load(path: Path) -> ModuleType:
    module = _import(path)
    _problem_of(module, path)
    return module


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(
            f"{path} is not there: give a Python file with problem(partition, num_partitions)"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"an own problem must be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _problem_of(module: ModuleType, path: Path, other: str = "") -> Callable[..., BilevelProblem]:
    make = getattr(module, "problem", None)
    if not callable(make):
        raise ValueError(f"{path} must have problem(partition, num_partitions){other}")
    return cast(Callable[..., BilevelProblem], make)
