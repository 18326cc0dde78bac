"""What rounds leave behind: a record of each, a run between two of them, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rabo.algorithms import State
from rabo.exchange.cost import Cost
from rabo.execution import Fault
from rabo.federation.ledger import LEVELS, Books, Coverage, Ledger, Level
from rabo.files import save_tensors
from rabo.tree import Params

CALIBRATION = "measure_curvature"  # an exchange that is not training


@dataclass(frozen=True)
class Round:
    """What happened in one round."""

    round: int  # counted from 0, as everywhere in Python and in files; what is shown, from 1
    metrics: Mapping[str, float]
    cost: Cost
    coverage: Mapping[Level, Coverage]
    present: Mapping[int, float]  # client -> width
    absent: Mapping[int, str]  # client -> why
    faults: Sequence[Fault] = ()  # answers that were not used
    skipped: str = ""  # why the round was given up, if it was
    entries: Sequence[Any] = field(repr=False, default=())
    total: Cost = field(default_factory=Cost)  # of all rounds so far
    relative_cost: Mapping[str, float] = field(default_factory=dict)  # to the full model, so far
    vectors: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # of an evaluation
    channels: Mapping[Level, Mapping[str, Sequence[float]]] = field(  # clients that trained each
        repr=False, default_factory=dict
    )
    seconds: float = 0.0  # on the wall clock, from the roll call to the evaluation

    def as_dict(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "metrics": dict(self.metrics),
            "cost": self.cost._asdict(),
            "coverage": {level: c._asdict() for level, c in self.coverage.items()},
            "present": {str(client): width for client, width in self.present.items()},
            "absent": {str(client): why for client, why in self.absent.items()},
            "faults": [fault._asdict() for fault in self.faults],
            "skipped": self.skipped,
            "total": self.total._asdict(),
            "relative_cost": dict(self.relative_cost),
            "seconds": self.seconds,
            **({"vectors": dict(self.vectors)} if self.vectors else {}),
        }

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> "Round":
        """Undo `as_dict`; the entries of single exchanges and the channels are not in it."""
        return cls(
            line["round"],
            line["metrics"],
            Cost(**line["cost"]),
            {level: Coverage(**line["coverage"][level]) for level in ("x", "y")},
            {int(client): width for client, width in line["present"].items()},
            {int(client): why for client, why in line["absent"].items()},
            [Fault(**fault) for fault in line["faults"]],
            line["skipped"],
            total=Cost(**line.get("total", {})),
            relative_cost=line.get("relative_cost", {}),
            vectors=line.get("vectors", {}),
            seconds=line.get("seconds", 0.0),
        )


class Snapshot(NamedTuple):
    """All that a run needs, between two rounds, to go on as if it had not stopped."""

    state: State
    books: Books
    full_cost: Cost


@dataclass(frozen=True, eq=False)
class Result:
    """The solution and its price."""

    x: Params = field(repr=False)
    y: Params = field(repr=False)
    state: State = field(repr=False)
    history: Sequence[Round] = field(repr=False)
    cost: Cost
    full_cost: Cost  # of the same rounds with the full model
    coverage: Mapping[str, float]
    ledger: Ledger = field(repr=False)

    @property
    def relative_cost(self) -> dict[str, float]:
        """Work and bytes as fractions of the full model's, measurements of l_{g,1} aside."""
        return relative_cost(self.ledger, self.full_cost)

    def export(
        self,
        folder: str | Path,
        levels: Mapping[str, Mapping[str, Tensor]] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        """Write what was ever trained, or other tensors, as x.safetensors and y.safetensors."""
        if levels is None:
            levels = {n: self.ledger.ever_trained(n, getattr(self, n)) for n in LEVELS}
        for name, tensors in levels.items():
            save_tensors(Path(folder) / f"{name}.safetensors", tensors, about or {})

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return {name: v for done in self.history for name, v in done.metrics.items()}


def relative_cost(ledger: Ledger, full_cost: Cost) -> dict[str, float]:
    """Compare work and bytes with the full model's; nothing where those were not counted."""
    if full_cost == Cost():
        return {}
    phases = ledger.by_phase.items()
    spent = reduce(Cost.plus, (c for p, c in phases if p != CALIBRATION), Cost())
    names = ("multiply_adds", "bytes_up", "bytes_down")
    return {n: getattr(spent, n) / max(1, getattr(full_cost, n)) for n in names}
