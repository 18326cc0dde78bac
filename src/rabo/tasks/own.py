"""A problem of your own: one Python file that says what each client has."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, overload

from rabo.algorithms import State
from rabo.ledger import Ledger
from rabo.problem import BilevelProblem
from rabo.resources import Resources
from rabo.solve import Client
from rabo.tasks.base import Setup


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """Solve the problem of a Python file with `problem(partition, num_partitions)`.

    It returns a `Problem` bound to the data of one client. Where a server has no data, the file
    also has `template()`, the same problem on none; `evaluate(x, y)`, if there, returns numbers.
    """

    file: Annotated[str, "Python file with problem(partition, num_partitions)"]

    def build(self, capacities: Sequence[Resources], rounds: int, seed: int, device: str) -> Setup:
        module = _load(Path(self.file))

        def evaluate(state: State, ledger: Ledger) -> dict[str, float]:
            found = module.evaluate(state.x, state.y) if hasattr(module, "evaluate") else {}
            return {name: float(value) for name, value in found.items()}

        return Setup(
            _Clients(module.problem, capacities),
            evaluate,
            "",
            template=getattr(module, "template", None),
        )


class _Clients(Sequence[Client]):
    """Clients that are made when they are asked for: a machine has the data of its own."""

    def __init__(
        self, problem: Callable[[int, int], BilevelProblem], capacities: Sequence[Resources]
    ):
        self._problem, self._capacities = problem, capacities

    def __len__(self) -> int:
        return len(self._capacities)

    @overload
    def __getitem__(self, index: int) -> Client: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Client]: ...

    def __getitem__(self, index: int | slice) -> Client | Sequence[Client]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        capacity = self._capacities[index]  # ends an iteration
        return Client(self._problem(index % len(self), len(self)), capacity)


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
