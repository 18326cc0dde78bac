"""Aggregated iterative differentiation: the chain rides on the inner exchanges (AggITD)."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from rabo.algorithms.corrected import CorrectedSteps
from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.slopes import (
    INNER_SLOPE,
    PULL_BACK,
    answer_inner_slope,
    answer_outer_slope,
    answer_product,
)
from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE, Cohort, Cuts, State
from rabo.exchange.work import Runtime, Work, Works, levels, named
from rabo.pruning.policies import Full, MaskPolicy
from rabo.seeding import stream
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class AggITD(CorrectedSteps):
    """N inner steps with corrected local steps; from step Q on, a vector p is carried with y.

    Q ~ U{0..N−1}: p = avg ∇_y f_i(x, y^Q), then p ← avg (I − β∇²_yy g_i(x, y^t))p for t = Q+1..N−1,
    at no extra exchange; in the end h = avg(∇_x f_i(x, y^N) − βN·∇²_xy g_i(x, y^N)p).

    Exchanges per round: 2N on y (y and p down, ∇_y g_i and the product up; their mean q down, y_i
    up) and 2 on x (y and p down, h_i up; their mean h down, x_i up).

    On submodels every mean is over the clients that hold an entry, as in `FedNest`. There is no
    momentum: the factors I − β∇²_yy g differentiate plain steps. These factors grow for
    β > 2/l_{g,1}, although the local steps are β/τ.
    """

    policy: MaskPolicy = field(default_factory=Full)  # as published

    paper: ClassVar[str] = (
        "Xiao, Ji: Communication-Efficient Federated Hypergradient Computation via Aggregated "
        "Iterative Differentiation, ICML 2023"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "2N + 2"
    vectors: ClassVar[str] = "x, y, q, p, x_h"
    second_order: ClassVar[bool] = True
    needs_one_y: ClassVar[bool] = True

    num_inner_steps: int = 10  # N

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_inner_steps < 1:
            raise ValueError(f"num_inner_steps must be at least 1, got {self.num_inner_steps}")

    @cached_property
    def works(self) -> Works:
        slopes = (INNER_SLOPE, BOTH_SLOPES, SLOPE_AND_PRODUCT, PULL_BACK)
        return named(MEASURE_CURVATURE, *slopes, self.correct_inner, self.correct_outer)

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        moves, p = state.round >= self.warm_up, {}
        start = self.start_of_chain(state.round) if moves else self.num_inner_steps
        for t in range(self.num_inner_steps):
            q, p = self._slopes(state, ask, p, t - start, {"x": state.x} if t == 0 else {})
            moved = self.step_inner(state, ask, q)
            state = replace(self.shorten(state, ask), y=moved.step(state.y, 1.0))
        if moves:
            p = {k: state.scalars["beta"] * self.num_inner_steps * v for k, v in p.items()}
            last = {"y": state.y, "p": p}
            h = ask.mean(PULL_BACK, last, self.snapshot_scalars)["x_h"]
            state = self.step_outer(state, ask, h.mean())
        return replace(self.follow_curvature(state, ask), round=state.round + 1)

    def start_of_chain(self, round: int) -> int:
        """Draw Q ~ U{0..N−1}."""
        generator = stream(self.seed, round, "start of chain")
        return int(torch.randint(self.num_inner_steps, (), generator=generator))

    def _slopes(
        self, state: State, ask: Exchanges, p: Params, since: int, x: dict[str, Params]
    ) -> tuple[Params, Params]:
        """One exchange at y^t: q, and the next p if the chain has started."""
        here, data = {**x, "y": state.y}, self.snapshot_scalars
        if since < 0:
            return ask.mean(INNER_SLOPE, here, data)["q"].mean(), p
        if since == 0:
            found = ask.mean(BOTH_SLOPES, here, data)
            return found["q"].mean(), found["p"].mean()
        found = ask.mean(SLOPE_AND_PRODUCT, {**here, "p": p}, data)
        state = self.shorten(state, ask)
        return found["q"].mean(), found["p"].step(p, state.scalars["beta"])


@dataclass(frozen=True)
class BothSlopes(Work):
    """On the client: ∇_y g_i and ∇_y f_i."""

    name = "both_slopes"
    takes = levels(x="x", y="y")
    answers = levels(q="y", p="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        q = answer_inner_slope(request, client)
        return Answer({"q": q, "p": answer_outer_slope(request, client)})


@dataclass(frozen=True)
class SlopeAndProduct(Work):
    """On the client: ∇_y g_i and ∇²_yy g_i·p."""

    name = "slope_and_product"
    takes = levels(x="x", y="y", p="y")
    answers = levels(q="y", p="y")
    numbers = (CURVATURE,)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        q = answer_inner_slope(request, client)
        product, stretched = answer_product(request, client)
        return Answer({"q": q, "p": product}, {CURVATURE: stretched})


BOTH_SLOPES, SLOPE_AND_PRODUCT = BothSlopes(), SlopeAndProduct()
