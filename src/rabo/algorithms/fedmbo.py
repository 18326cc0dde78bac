"""Federated minibatch bilevel optimisation with independent chains of Hessian factors (FedMBO)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.inner import InnerLevel, accelerate
from rabo.algorithms.outer import OuterLevel
from rabo.algorithms.secants import SafeSteps, on_rows
from rabo.algorithms.series import RandomSeries
from rabo.algorithms.slopes import (
    HESSIAN_PRODUCT,
    OUTER_SLOPE,
    answer_inner_slope,
    answer_pull_back,
    fresh_batch,
    inner_slopes,
    minus,
    point,
)
from rabo.exchange.client import ClientContext
from rabo.exchange.covering import Covered
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE, Cohort, Cuts, State
from rabo.exchange.work import Runtime, Work, Works, levels, named
from rabo.hypergradients.linearisation import Exact, View
from rabo.hypergradients.solvers import neumann
from rabo.problems.bilevel import BilevelProblem
from rabo.pruning.policies import Full, MaskPolicy
from rabo.seeding import stream
from rabo.tree import Params, flatten, leaves


@dataclass(frozen=True, kw_only=True)
class FedMBO(InnerLevel, OuterLevel, RandomSeries):
    """T averaged steps on y, then one chain per client through the Hessians of random clients.

    Exchanges per round: T for y (y down, ∇_y g_i up), 1 for ∇_y f_j, as many as the longest chain
    has factors, N' = max_j N'_j with N'_j ~ U{0..N−1}, and 1 for x (p_j down, up what moves x,
    ∇_x f_k − ∇²_xy g_k·p_j). The client k at the end is drawn afresh like those on the way: at
    client j, ∇²_xy g_j and ∇_y f_j would go together, and the mean would not be the hypergradient
    of all clients. A chain that meets a client that does not answer is lost.

    Departs from the paper in how clients are drawn: no two chains meet the same client at a time,
    because all clients then have the same work. Every client of a chain is still a uniform draw,
    independent of its others. On submodels a factor I − ∇²_yy g_k/L changes the entries of p_j that
    client k holds. The momentum is the server's, on the mean of ∇_y g_i.

    Departs from the paper where clients train copies of y, one per task: no other client has such a
    y, so the T steps and the factors stay on the client (2 exchanges). Without anything to relay,
    the client takes the mean over N' itself: the truncated series.

    The server holds a vector in y for every chain: its memory grows with the number of clients.
    """

    policy: MaskPolicy = field(default_factory=Full)  # as published

    paper: ClassVar[str] = (
        "Huang, Zhang, Ji: Achieving Linear Speedup in Non-IID Federated Bilevel Learning, "
        "ICML 2023"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "T + N' + 2, N' < N at random (2 with copies of y)"
    vectors: ClassVar[str] = "x, y, p"
    second_order: ClassVar[bool] = True

    @property
    def separable(self) -> bool:
        return True  # used where every task has its own y

    @cached_property
    def works(self) -> Works:
        alone = (self.update_inner, self.estimate_privately)  # where tasks have copies of y
        together = (self.inner_slope, OUTER_SLOPE, HESSIAN_PRODUCT, MOVING_PULL_BACK)
        return named(MEASURE_CURVATURE, *alone, *together)

    @cached_property
    def inner_slope(self) -> "MovingSlope":
        """∇_y g_i of a client."""
        return MovingSlope(self.adapts_beta, (CURVATURE,) if self.adapts_beta else ())

    @cached_property
    def estimate_privately(self) -> "EstimatePrivately":
        """The hypergradient at a client's own copies of y."""
        return EstimatePrivately(self.num_terms)

    def init(self, problem: BilevelProblem) -> State:
        state = super().init(problem)
        return replace(state, scalars={"copies": problem.copies})

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state, L = self.with_step_sizes(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        private = state.scalars["copies"] > 1
        state = (self.train_inner if private else self._descend_inner)(state, ask)
        if state.round >= self.warm_up:
            slope = (self._private if private else self._relayed)(state, ask, L)
            state = self.move_outer(state, slope)
        return replace(self.follow_curvature(state, ask), round=state.round + 1)

    def _descend_inner(self, state: State, ask: Exchanges) -> State:
        """y −= β·avg ∇_y g_i, T times."""
        velocity: Params = {}
        beta = {"beta": state.scalars["beta"]}
        for t in range(self.num_inner_steps):
            here = {"x": state.x, "y": state.y} if t == 0 else {"y": state.y}
            slope = ask.mean(self.inner_slope, here, beta)["y"]
            state = self.shorten(state, ask)
            velocity = accelerate(velocity, slope.mean(), self.momentum)
            state = replace(state, y=minus(state.y, velocity, state.scalars["beta"]))
        return state

    def _relayed(self, state: State, ask: Exchanges, L: float) -> Covered:
        """The mean of ∇_x f_k − ∇²_xy g_k·p_j with p_j = (N/L) Π_i (I − ∇²_yy g_i/L)∇_y f_j."""
        y = ask.cuts.extract("y", state.y)
        asked = ((j, {"y": y(j)}) for j in sorted(ask.present))
        chains: dict[int, Params] = {}
        bounds = dict.fromkeys(sorted(ask.present), L)  # each chain has its own
        for reply in ask.send(OUTER_SLOPE, asked):
            j = reply.client
            slope = ask.cuts[j].y.expand(reply.arrays["p"])
            chains[j] = {k: self.num_terms / L * v for k, v in slope.items()}
        for t in range(self.num_terms - 1):
            going = {j for j in chains if t < self.num_factors(state.round, j)}
            met = self._meetings(state.round, t, going, ask.present)
            if met:
                self._multiply(chains, met, ask, bounds)
        mean = ask.cuts.aggregate.begin(state.x)
        met = self._meetings(state.round, self.num_terms - 1, set(chains), ask.present)
        for reply in ask.send(MOVING_PULL_BACK, self._vectors(chains, met, ask)):
            mean.add(ask.cuts[reply.client].x, reply.arrays["x"])
        return mean

    def _meetings(
        self, round: int, step: int, chains: set[int], present: set[int]
    ) -> dict[int, int]:
        """Return the chain that each client meets, if any."""
        clients = sorted(present)
        pairs = zip(self.relay(round, step, clients), clients, strict=True)
        return {k: j for k, j in sorted(pairs) if j in chains}

    def relay(self, round: int, step: int, present: Sequence[int]) -> Sequence[int]:
        """Draw the clients that the chains of the present clients meet next, one for each."""
        generator = stream(self.seed, round, "relay", step)
        order = torch.randperm(len(present), generator=generator)
        return [present[i] for i in order.tolist()]

    def _multiply(
        self,
        chains: dict[int, Params],
        met: dict[int, int],
        ask: Exchanges,
        bounds: dict[int, float],
    ) -> None:
        """One exchange: p_j ← (I − ∇²_yy g_k/L_j)p_j for the chain j that meets client k."""
        lost = set(met.values())
        for reply in ask.send(HESSIAN_PRODUCT, self._vectors(chains, met, ask)):
            k = reply.client
            j, product = met[k], ask.cuts[k].y.expand(reply.arrays["p"])
            bounds[j], ratio = self.enlarged(bounds[j], reply.scalars[CURVATURE])
            factor = minus(chains[j], product, 1 / bounds[j])
            chains[j] = {name: ratio * v for name, v in factor.items()}
            lost.discard(j)
        for j in lost:
            del chains[j]

    def _vectors(
        self, chains: Mapping[int, Params], met: Mapping[int, int], ask: Exchanges
    ) -> Iterator[tuple[int, Mapping[str, Params]]]:
        for k, j in met.items():
            yield k, {"p": ask.cuts[k].y.extract(chains[j])}

    def _private(self, state: State, ask: Exchanges, L: float) -> Covered:
        """The mean of the hypergradients at the clients' own copies of y."""
        return ask.mean(self.estimate_privately, {}, {"step": 1 / L})["x"]


@dataclass(frozen=True)
class MovingSlope(Work):
    """On the client: ∇_y g_i, which moves y; first with the secant of a trial step."""

    adapts_beta: bool
    numbers: tuple[str, ...] = ()

    name = "inner_slope"
    takes = levels(x="x", y="y")
    answers = levels(y="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        if not self.adapts_beta:
            return Answer({"y": answer_inner_slope(request, client)})
        y, batch = point(request, client)[1], fresh_batch(request, client, "inner")
        slope_at = inner_slopes(client, batch)
        slope, rows = slope_at(y), flatten(leaves(y))
        safe = SafeSteps(request.scalars["beta"], rows)
        if "x" in request.arrays:
            safe.probe(rows, flatten(leaves(slope)), on_rows(slope_at, y))
        return Answer({"y": slope}, {CURVATURE: safe.curvature.max()})


@dataclass(frozen=True)
class MovingPullBack(Work):
    """On the client: ∇_x f_k − ∇²_xy g_k·p_j, which moves x."""

    name = "pull_back"
    takes = levels(p="y")
    answers = levels(x="x")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        return Answer({"x": answer_pull_back(request, client)})


MOVING_PULL_BACK = MovingPullBack()


@dataclass(frozen=True)
class EstimatePrivately(Work):
    """On the client: ∇_x f_j − ∇²_xy g_j·p_j, with the truncated series for every copy."""

    num_terms: int
    separable: bool = True

    name = "estimate_privately"
    takes = levels()
    answers = levels(x="x")
    numbers = ("residual", CURVATURE)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        batch = client.draw(request, "outer")
        x, y = client.memory["x"], client.memory["y"]
        system = Exact(View(client.problem, x, y, batch, one_pass=True))
        step = request.scalars["step"]
        found = neumann(system.product, system.rhs, self.num_terms, step)
        numbers = {"residual": found.residual, CURVATURE: found.curvature}
        return Answer({"x": system.pull_back(found.v)}, numbers)
