"""An algorithm on some clients, one round at a time, without what a federation adds for its record.

That is a full-size probe for relative costs, and evaluation.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rabo.algorithms import Algorithm, Cohort
from rabo.exchange.state import Cuts
from rabo.execution import InProcess, Runtime
from rabo.federation.ledger import Ledger
from rabo.problems.bilevel import BilevelProblem
from rabo.runs.experiment import Experiment


class Trial:
    """Rounds that follow one another; β is measured before the first."""

    def __init__(
        self,
        problems: Mapping[int, BilevelProblem],
        widths: Mapping[int, float],
        algorithm: Algorithm,
        runtime: Runtime | None = None,
    ):
        self.algorithm, self.ledger = algorithm, Ledger(runtime or InProcess(problems))
        self.cohort = Cohort(problems[0].channels, widths)
        start = algorithm.init(problems[0])
        self.ledger.begin(start.x, start.y)
        self.state = algorithm.prepare(start, self.cohort, self.ledger)

    def round(self) -> None:
        self.ledger.begin(self.state.x, self.state.y)
        self.state = self.algorithm.round(self.state, self.cohort, self.ledger)

    def cuts(self) -> Cuts:
        """What clients hold in the next round."""
        policy = self.algorithm.policy  # type: ignore[attr-defined]
        return Cuts(policy, self.state, self.cohort, self.algorithm.seed)

    def peaks(self) -> dict[str, float]:
        """Megabytes of a client's live tensors at most, by what it did in the last round."""
        found: dict[str, float] = {}
        for entry in self.ledger.entries:
            megabytes = entry.cost.peak_memory_bytes / 1e6
            found[entry.phase] = max(found.get(entry.phase, 0.0), megabytes)
        return found


def trial_of(experiment: Experiment) -> Trial:
    """Build what `rabo run` would; capacities must be widths."""
    federation, _ = experiment.federation()
    clients = dict(enumerate(federation.clients))
    algorithm: Any = federation.algorithm
    if hasattr(algorithm, "warm_up"):
        algorithm = replace(algorithm, warm_up=0)
    return Trial(
        {i: client.problem for i, client in clients.items()},
        {i: float(client.capacity) for i, client in clients.items()},  # type: ignore[arg-type]
        algorithm,
        federation.ledger.runtime,
    )
