"""A problem of your own: one Python file that says what each client has."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, ClassVar

from rabo.algorithms import State
from rabo.clients import Client, OnDemand
from rabo.ledger import Ledger
from rabo.resources import Resources
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
            template=getattr(module, "template", None),
        )


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"an own problem must be a Python file, got {path}, which is not there")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"an own problem must be a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "problem"):
        raise ValueError(f"{path} must have problem(partition, num_partitions)")
    return module
