"""Federated bilevel optimisation by local steps (FedBiO)."""

from dataclasses import dataclass
from typing import ClassVar

from rabo.algorithms.simultaneous import Simultaneous
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.state import Cohort, Cuts, State
from rabo.exchange.work import Runtime


@dataclass(frozen=True, kw_only=True)
class FedBiO(Simultaneous):
    """I local SGD steps on x, y and v, then all three are averaged.

    Exchanges per round: 1 (x, y and v down; what they moved by, over the step size, up). On
    submodels the average is over the clients that hold an entry.
    """

    paper: ClassVar[str] = (
        "Li, Huang, Huang: Communication-Efficient Federated Bilevel Optimization with Global and "
        "Local Lower Level Problems, NeurIPS 2023"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y, v"
    second_order: ClassVar[bool] = True

    num_local_steps: int = 5  # I

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {self.num_local_steps}")

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        slopes = self.gather(state, ask, lambda _: self.num_local_steps)
        state = self.shorten(state, ask)
        return self.follow_curvature(self.move(state, slopes, 1.0), ask)
