"""FedBiO with directions that remember: momentum-based variance reduction (FedBiOAcc)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from rabo.algorithms.secants import SafeSteps
from rabo.algorithms.simultaneous import (
    Simultaneous,
    Triple,
    directions,
    inner_slope_of,
    view_at,
)
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.state import Cohort, Cuts, State
from rabo.exchange.work import Local, Reply, Runtime, Task, answers
from rabo.tree import Params, flatten, leaves

DIRECTIONS = ("x_direction", "y_direction", "v_direction")


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
            first = ask.mean(self.first_directions, self._point(state), *DIRECTIONS)
            means = (mean.mean() for mean in first)
            state = replace(
                state, vectors={**state.vectors, **dict(zip(DIRECTIONS, means, strict=True))}
            )
        kept = {name: state.vectors[name] for name in ("v", *DIRECTIONS)}
        scalars = {**self.sizes(state), "steps": float(state.round * self.num_local_steps)}
        x, y, *moved = ask.mean(
            self.take_directed_steps,
            {**self._point(state), **kept},
            *("x", "y", *kept),
            scalars=scalars,
        )
        if state.round >= self.warm_up:
            state = self.move_outer(state, x)
        after = {n: m.step(kept[n], 1.0) for n, m in zip(kept, moved, strict=True)}
        vectors = {**state.vectors, **after}
        state = self.follow_curvature(state, ask)
        return replace(state, round=state.round + 1, y=y.step(state.y, 1.0), vectors=vectors)

    def _point(self, state: State) -> dict[str, Params]:
        return {"x": state.x, "y": state.y, "v": state.vectors["v"]}

    @answers(*DIRECTIONS)
    def first_directions(self, task: Task, local: Local) -> Reply:
        """On the client: G(z; B)."""
        at = Triple(*(task.arrays[name] for name in Triple._fields))
        found = directions(view_at(local.problem, at, local.draw(task, "first")), at).slopes
        return Reply(dict(zip(DIRECTIONS, found, strict=True)))

    @answers(*Triple._fields, *DIRECTIONS, scalars=lambda self: self.safe_numbers)
    def take_directed_steps(self, task: Task, local: Local) -> Reply:
        """On the client: I steps; answer what z and the directions moved by, x over α."""
        start = Triple(*(task.arrays[name] for name in Triple._fields))
        first = Triple(*(task.arrays[name] for name in DIRECTIONS))
        alpha, beta = task.scalars["alpha"], task.scalars["beta"]
        at, d, way = start, first, first.minus(first, 1.0, 1.0).x
        y = flatten(leaves(at.y))
        safe, steepest = SafeSteps(beta, y), []
        taken = torch.as_tensor(task.scalars["steps"], dtype=torch.float64)
        if self.adapts_beta:
            slope_at = inner_slope_of(view_at(local.problem, at, local.draw(task, 0)))
            safe.probe(y, slope_at(y), slope_at)
            beta = safe.size
        for k in range(self.num_local_steps):
            rate = (self.horizon / (self.horizon + taken + k)) ** (1 / 3)
            way = {name: v + rate * d.x[name] for name, v in way.items()}
            before, at = at, at.minus(d, rate * alpha, rate * beta)
            batch, keep = local.draw(task, k), 1 - self.forgetting * rate**2
            there = directions(view_at(local.problem, before, batch), before).slopes
            here, curvature = directions(view_at(local.problem, at, batch), at)
            steepest.append(curvature)
            d = here.minus(d.minus(there, 1.0, 1.0), -keep, -keep)
        moved, turned = start.minus(at, 1.0, 1.0), first.minus(d, 1.0, 1.0)
        changes = dict(zip(DIRECTIONS, turned, strict=True))
        seen = safe.seen(torch.stack(steepest).max()) if self.adapts_beta else {}
        return Reply({"x": way, "y": moved.y, "v": moved.v, **changes}, seen)
