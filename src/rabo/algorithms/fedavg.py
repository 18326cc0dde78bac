"""Federated averaging of y under a fixed x: the single-level baseline."""

from dataclasses import dataclass, replace
from typing import ClassVar

from rabo.algorithms.base import Cohort, Cuts, State
from rabo.algorithms.inner import InnerLevel
from rabo.runtimes.base import Runtime


@dataclass(frozen=True, kw_only=True)
class FedAvg(InnerLevel):
    """Local steps on g alone, averaged over the clients that held an entry (McMahan et al., 2017).

    x stays where it starts: in loss tuning, the untuned loss.
    """

    paper: ClassVar[str] = (
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep "
        "Networks from Decentralized Data, AISTATS 2017"
    )
    kind: ClassVar[str] = "single level, full model"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y"
    second_order: ClassVar[bool] = False

    def num_exchanges(self, state: State, cohort: Cohort) -> int:
        return 1

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state, _ = self.train_inner(state, cuts, runtime)
        return replace(state, round=state.round + 1)
