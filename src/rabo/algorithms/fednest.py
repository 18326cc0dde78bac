"""Federated alternating bilevel steps with a global Hessian (FedNest)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from rabo.algorithms.base import Cohort, Cuts, State
from rabo.algorithms.corrected import CorrectedSteps
from rabo.algorithms.exchanges import Exchanges
from rabo.algorithms.inner import InnerLevel
from rabo.algorithms.series import RandomSeries
from rabo.algorithms.slopes import hessian_product, inner_slope, minus, outer_slope, pull_back
from rabo.masks import Full, MaskPolicy
from rabo.runtimes.base import Runtime
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class FedNest(InnerLevel, CorrectedSteps, RandomSeries):
    """T inner steps with corrected local steps, a random Neumann chain over all clients' Hessians.

    Exchanges per round: 2T on y (y down, ∇_y g_i up; their mean q down, y_i up), 1 for ∇_y f_i,
    N' ~ U{0..N−1} products of p, and 2 on x (p down, h_i up; their mean h down, x_i up).

    Departs from the paper in who answers a product, the clients of the round in place of a fresh
    draw, because a client that was not asked before holds neither x nor y. On submodels every mean
    is over the clients that hold an entry, that of (I − ∇²_yy g_i/L)p too: an entry of p that one
    client holds is multiplied by its Hessian alone. The momentum is the server's, on y − avg y_i.
    """

    policy: MaskPolicy = field(default_factory=Full)  # as published

    paper: ClassVar[str] = (
        "Tarzanagh, Li, Thrampoulidis, Oymak: FedNest: Federated Bilevel, Minimax, and "
        "Compositional Optimization, ICML 2022"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "2T + N' + 3, N' < N at random"
    vectors: ClassVar[str] = "x, y, q, p, x_h"
    second_order: ClassVar[bool] = True
    needs_one_y: ClassVar[bool] = True

    def num_exchanges(self, state: State, cohort: Cohort) -> int:
        outer = self.num_factors(state.round) + 3 if state.round >= self.warm_up else 0
        return 2 * self.num_inner_steps + outer

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state, L = self.with_step_sizes(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        velocity: Params = {}
        for t in range(self.num_inner_steps):
            here = {"x": state.x, "y": state.y} if t == 0 else {"y": state.y}
            [q] = ask.mean(inner_slope, here, "q")
            velocity = self.accelerate(velocity, self.step_inner(state, ask, q.mean()).mean())
            state = replace(state, y=minus(state.y, velocity))
        if state.round >= self.warm_up:
            p = self._inverse_product(state, ask, L)
            [h] = ask.mean(pull_back, {"p": p}, "x_h")
            state = self.step_outer(state, ask, h.mean())
        return replace(state, round=state.round + 1)

    def _inverse_product(self, state: State, ask: Exchanges, L: float) -> Params:
        """p ≈ [∇²_yy g]⁻¹∇_y f: (N/L)·avg ∇_y f_i, then N' times avg (I − ∇²_yy g_i/L)p."""
        [slope] = ask.mean(outer_slope, {"y": state.y}, "p")
        p: Params = {k: self.num_terms / L * v for k, v in slope.mean().items()}
        for _ in range(self.num_factors(state.round)):
            [product] = ask.mean(hessian_product, {"p": p}, "p")
            p = product.step(p, 1 / L)
        return p
