"""FedBiO with directions that remember: momentum-based variance reduction (FedBiOAcc)."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.secants import SafeSteps
from rabo.algorithms.simultaneous import (
    Simultaneous,
    Triple,
    directions,
    inner_slope_of,
    view_at,
)
from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import Cohort, Cuts, State
from rabo.exchange.work import Runtime, Work, Works, levels, named
from rabo.tree import Params, flatten, leaves

LEVELS_OF_DIRECTIONS = levels(x_direction="x", y_direction="y", v_direction="y")
DIRECTIONS = tuple(LEVELS_OF_DIRECTIONS)


@dataclass(frozen=True, kw_only=True)
class FedBiOAcc(Simultaneous):
    """I local steps along directions d⁺ = G(z⁺; B) + (1 − cα_t²)(d − G(z; B)), B the same in both.

    z = (x, y, v) and its three directions are averaged after I steps. Exchanges per round: 1 (x, y,
    v and the directions down, what they moved by up), and in the first round 1 more for the first
    directions, G(z; B). On submodels averages are over the clients that hold an entry.

    Departs from the paper in units only: α_t = δ/(u₀ + σ²t)^{1/3} is written (h/(h + t))^{1/3} with
    h = u₀/σ², and δ/u₀^{1/3} belongs to alpha and beta, which are then the sizes of the first step.
    """

    paper: ClassVar[str] = (
        "Li, Huang, Huang: Communication-Efficient Federated Bilevel Optimization with Global and "
        "Local Lower Level Problems, NeurIPS 2023"
    )
    kind: ClassVar[str] = "bilevel, full model"
    exchanges: ClassVar[str] = "1 (2 in the first round)"
    vectors: ClassVar[str] = "x, y, v, x_direction, y_direction, v_direction"
    second_order: ClassVar[bool] = True

    num_local_steps: int = 5  # I
    horizon: float = 1000.0  # h: local steps after which α_t has begun to fall
    forgetting: float = 0.1  # c

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {self.num_local_steps}")
        if not self.horizon > 0:
            raise ValueError(f"horizon must be positive, got {self.horizon}")
        if not 0 <= self.forgetting <= 1:
            raise ValueError(f"forgetting must lie in [0, 1], got {self.forgetting}")

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        ask = Exchanges(state, cuts, runtime, self.seed)
        if not set(DIRECTIONS) <= set(state.vectors):
            first = ask.mean(FIRST_DIRECTIONS, self._point(state))
            means = {name: mean.mean() for name, mean in first.items()}
            state = replace(state, vectors={**state.vectors, **means})
        kept = {name: state.vectors[name] for name in ("v", *DIRECTIONS)}
        scalars = {**self.sizes(state), "steps": float(state.round * self.num_local_steps)}
        moved = ask.mean(self.take_directed_steps, {**self._point(state), **kept}, scalars)
        if state.round >= self.warm_up:
            state = self.move_outer(state, moved["x"])
        after = {name: moved[name].step(vector, 1.0) for name, vector in kept.items()}
        vectors = {**state.vectors, **after}
        state = self.follow_curvature(state, ask)
        return replace(
            state, round=state.round + 1, y=moved["y"].step(state.y, 1.0), vectors=vectors
        )

    def _point(self, state: State) -> dict[str, Params]:
        return {"x": state.x, "y": state.y, "v": state.vectors["v"]}

    @cached_property
    def works(self) -> Works:
        return named(MEASURE_CURVATURE, FIRST_DIRECTIONS, self.take_directed_steps)

    @cached_property
    def take_directed_steps(self) -> "TakeDirectedSteps":
        """I local steps along the directions."""
        return TakeDirectedSteps(
            self.num_local_steps,
            self.horizon,
            self.forgetting,
            self.adapts_beta,
            self.safe_numbers,
        )


@dataclass(frozen=True)
class FirstDirections(Work):
    """On the client: G(z; B)."""

    name = "first_directions"
    takes = levels(x="x", y="y", v="y")
    answers = LEVELS_OF_DIRECTIONS

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        at = Triple.of(request)
        batch = client.draw(request, "first")
        found = directions(view_at(client.problem, at, batch), at).slopes
        return Answer(dict(zip(DIRECTIONS, found, strict=True)))


FIRST_DIRECTIONS = FirstDirections()


@dataclass(frozen=True)
class TakeDirectedSteps(Work):
    """On the client: I steps; answer what z and the directions moved by, x over α."""

    num_steps: int
    horizon: float
    forgetting: float
    adapts_beta: bool
    numbers: tuple[str, ...] = ()

    name = "take_directed_steps"
    takes = levels(x="x", y="y", v="y", **LEVELS_OF_DIRECTIONS)
    answers = levels(x="x", y="y", v="y", **LEVELS_OF_DIRECTIONS)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        start = Triple.of(request)
        first = Triple(*(request.arrays[name] for name in DIRECTIONS))
        alpha, beta = request.scalars["alpha"], request.scalars["beta"]
        at, d, way = start, first, first.minus(first, 1.0, 1.0).x
        y = flatten(leaves(at.y))
        safe, steepest = SafeSteps(beta, y), []
        taken = torch.as_tensor(request.scalars["steps"], dtype=torch.float64)
        if self.adapts_beta:
            slope_at = inner_slope_of(view_at(client.problem, at, client.draw(request, 0)))
            safe.probe(y, slope_at(y), slope_at)
            beta = safe.size
        for k in range(self.num_steps):
            rate = (self.horizon / (self.horizon + taken + k)) ** (1 / 3)
            way = {name: v + rate * d.x[name] for name, v in way.items()}
            before, at = at, at.minus(d, rate * alpha, rate * beta)
            batch, keep = client.draw(request, k), 1 - self.forgetting * rate**2
            there = directions(view_at(client.problem, before, batch), before).slopes
            here, curvature = directions(view_at(client.problem, at, batch), at)
            steepest.append(curvature)
            d = here.minus(d.minus(there, 1.0, 1.0), -keep, -keep)
        moved, turned = start.minus(at, 1.0, 1.0), first.minus(d, 1.0, 1.0)
        changes = dict(zip(DIRECTIONS, turned, strict=True))
        seen = safe.seen(torch.stack(steepest).max()) if self.adapts_beta else {}
        return Answer({"x": way, "y": moved.y, "v": moved.v, **changes}, seen)
