"""What a task is: options of its own, and clients built from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from rabo.algorithms import State
from rabo.exchange.budgets import Resources
from rabo.federation.clients import Client
from rabo.federation.federation import Evaluate
from rabo.federation.ledger import Ledger
from rabo.problems.bilevel import BilevelProblem


@dataclass(frozen=True)
class Setup:
    """What a run needs from a task."""

    clients: Sequence[Client]
    evaluate: Evaluate  # on the server
    headline: str  # the metric a reader looks at first
    options: Mapping[str, Any] = field(default_factory=dict)  # advice for any algorithm
    own_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # for one of a name
    evaluate_every: int = 1
    falls: bool = False  # whether a smaller headline is better
    judged_by: Callable[[Callable[..., Any]], "Setup"] | None = None  # with another `predict`
    finish: Callable[[State, Ledger, Path], None] | None = None  # writes pictures and tables
    export: Callable[[State, Ledger], Mapping[str, Mapping[str, Tensor]]] | None = None
    template: Callable[[], BilevelProblem] | None = None  # for a server without data
    evaluate_here: Evaluate | None = None  # also reads the clients' data: in process alone


def equal_steps(num_steps: int) -> dict[str, dict[str, Any]]:
    """Give algorithms that nest or merge their steps as many gradients of g a round as others."""
    nested = {
        "num_inner_steps": max(1, num_steps // 5),
        "num_local_steps": min(5, num_steps),
    }
    merged = {"num_local_steps": num_steps}
    return {
        **dict.fromkeys(("fednest", "aggitd"), nested),
        **dict.fromkeys(("simfbo", "shrofbo", "fedbio", "fedbioacc"), merged),
    }


def check_at_least_one(task: Any, *names: str) -> None:
    """Refuse a task whose numbers of this or that are not positive."""
    for name in names:
        if getattr(task, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(task, name)}")


class Task(Protocol):
    """A frozen dataclass whose fields are the options of `rabo run TASK`."""

    example: ClassVar[str]  # options to begin with, for the help of its commands

    def build(
        self, capacities: Sequence[Resources], rounds: int, seed: int, device: str
    ) -> Setup: ...
