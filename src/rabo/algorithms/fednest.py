"""Federated alternating bilevel steps with a global Hessian (FedNest)."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch

from rabo.algorithms.corrected import CorrectedSteps
from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.inner import InnerLevel, accelerate
from rabo.algorithms.series import RandomSeries
from rabo.algorithms.slopes import HESSIAN_PRODUCT, INNER_SLOPE, OUTER_SLOPE, PULL_BACK, minus
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.state import Cohort, Cuts, State
from rabo.exchange.work import Runtime, Works, named
from rabo.pruning.policies import Full, MaskPolicy
from rabo.seeding import stream
from rabo.tree import Params, plus


@dataclass(frozen=True, kw_only=True)
class FedNest(InnerLevel, CorrectedSteps, RandomSeries):
    """T inner steps with corrected local steps, a random Neumann chain over all clients' Hessians.

    Exchanges per round: 2T on y (y down, ∇_y g_i up; their mean q down, y_i up), 1 for ∇_y f_i,
    N' ~ U{0..N−1} products of p, and 2 on x (p down, h_i up; their mean h down, x_i up).

    `series="truncated"` always takes N−1 products and sums (1/L) Σ_{k<N} (I − H/L)^k ∇_y f. The
    random chain has this sum as its mean. The option `--neumann n` of the released code takes n
    products: use num_terms = n + 1, and smoothness = 1/hlr.

    `separate_clients=True` splits the clients of a round at random. One half trains y. The other
    half receives x and the new y, takes the products and moves x. A single client does both. The
    released code draws clients for each level independently, so its two groups may overlap. Double
    the participation to keep the number of clients per level.

    Departs from the paper, which draws new clients for every product: the same clients answer,
    because new ones hold neither x nor y. On submodels every mean is over the clients that hold an
    entry, including that of (I − ∇²_yy g_i/L)p: if one client holds an entry of p, its Hessian
    alone multiplies it. The server applies momentum to y − avg y_i.
    """

    policy: MaskPolicy = field(default_factory=Full)  # as published
    series: Literal["random", "truncated"] = "random"
    separate_clients: bool = False

    paper: ClassVar[str] = (
        "Tarzanagh, Li, Thrampoulidis, Oymak: FedNest: Federated Bilevel, Minimax, and "
        "Compositional Optimization, ICML 2022"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "2T + N' + 3, N' < N at random"
    vectors: ClassVar[str] = "x, y, q, p, x_h"
    second_order: ClassVar[bool] = True
    needs_one_y: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.series not in ("random", "truncated"):
            raise ValueError(f"series must be random or truncated, got {self.series!r}")

    @cached_property
    def works(self) -> Works:
        slopes = (INNER_SLOPE, OUTER_SLOPE, HESSIAN_PRODUCT, PULL_BACK)
        return named(MEASURE_CURVATURE, *slopes, self.correct_inner, self.correct_outer)

    @property
    def step_over_beta(self) -> float:
        """The length of a local step on y, β/τ."""
        return 1 / self.num_local_steps

    def num_products(self, round: int) -> int:
        """N' of a round, or N − 1."""
        return self.num_terms - 1 if self.series == "truncated" else self.num_factors(round)

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state, L = self.with_step_sizes(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        others = Exchanges(state, cuts, runtime, self.seed)
        if self.separate_clients:
            ask.present, others.present = self.halves(state.round, ask.present)
        velocity: Params = {}
        for t in range(self.num_inner_steps):
            here = {"x": state.x, "y": state.y} if t == 0 else {"y": state.y}
            q = ask.mean(INNER_SLOPE, here, self.snapshot_scalars)["q"].mean()
            moved = self.step_inner(state, ask, q).mean()
            velocity = accelerate(velocity, moved, self.momentum)
            state = replace(self.shorten(state, ask), y=minus(state.y, velocity))
        if state.round >= self.warm_up:
            outer = others if self.separate_clients else ask
            p = self._inverse_product(state, outer, L)
            h = outer.mean(PULL_BACK, {"p": p}, self.snapshot_scalars)["x_h"]
            state = self.step_outer(state, outer, h.mean())
        return replace(self.follow_curvature(state, ask, others), round=state.round + 1)

    def halves(self, round: int, present: set[int]) -> tuple[set[int], set[int]]:
        """Draw the clients of the inner and of the outer level."""
        if len(present) < 2:
            return present, set(present)
        clients, generator = sorted(present), stream(self.seed, round, "levels")
        order = [clients[i] for i in torch.randperm(len(clients), generator=generator).tolist()]
        number = (len(order) + 1) // 2
        return set(order[:number]), set(order[number:])

    def _inverse_product(self, state: State, ask: Exchanges, L: float) -> Params:
        """p ≈ [∇²_yy g]⁻¹∇_y f: (N/L)·avg ∇_y f_i, then N' times avg (I − ∇²_yy g_i/L)p.

        The truncated series starts from (1/L)·avg ∇_y f_i and sums all p on the way.
        """
        is_sum = self.series == "truncated"
        here = {"x": state.x, "y": state.y} if self.separate_clients else {"y": state.y}
        slope = ask.mean(OUTER_SLOPE, here, self.snapshot_scalars)["p"]
        p: Params = {k: (1 if is_sum else self.num_terms) / L * v for k, v in slope.mean().items()}
        total = p
        for _ in range(self.num_products(state.round)):
            product = ask.mean(HESSIAN_PRODUCT, {"p": p}, self.snapshot_scalars)["p"]
            L, ratio = self.enlarged(L, ask.largest_curvature())
            p = {k: ratio * v for k, v in product.step(p, 1 / L).items()}
            total = plus(p, ratio, total) if is_sum else p
        return total
