"""A problem of your own: one Python file that says what each client has."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, ClassVar, cast

from rabo.algorithms import State
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client, OnDemand
from rabo.federation.ledger import Ledger
from rabo.problems.bilevel import BilevelProblem
from rabo.tasks.base import Setup


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """Solve the problem of a Python file with `problem(partition, num_partitions)`.

    It returns a `Problem` bound to the data of one client. Where a server has no data, the file
    also has `template()`, the same problem on none; `evaluate(x, y)`, if there, returns numbers.
    """

    example: ClassVar[str] = "--file problem.py --clients 3 --rounds 20"

    file: Annotated[str, "Python file with problem(partition, num_partitions)"]

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        module = _load(Path(self.file))

        def evaluate(state: State, ledger: Ledger) -> dict[str, float]:
            found = module.evaluate(state.x, state.y) if hasattr(module, "evaluate") else {}
            return {name: float(value) for name, value in found.items()}

        @cache
        def client(index: int) -> Client:  # a machine has the data of its own alone
            return Client(module.problem(index, len(capacities)), capacities[index])

        return Setup(
            OnDemand(len(capacities), client),
            evaluate,
            "",
            options={"outer_step": "adam"},
            template=getattr(module, "template", None),
        )


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
