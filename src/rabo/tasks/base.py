"""What a task is: options of its own, and clients built from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rabo.resources import Resources
from rabo.solve import Client, Evaluate


@dataclass(frozen=True)
class Setup:
    """What a run needs from a task."""

    clients: Sequence[Client]
    evaluate: Evaluate
    headline: str  # the metric a reader looks at first
    options: Mapping[str, Any] = field(default_factory=dict)  # the algorithm's, unless given


class Task(Protocol):
    """A frozen dataclass whose fields are the options of `rabo run TASK`."""

    def build(self, capacities: Sequence[Resources], seed: int, device: str) -> Setup: ...
