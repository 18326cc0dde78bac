"""Local steps on x, y and v at once, v following [∇²_yy g]⁻¹∇_y f by steps of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.outer import OuterLevel
from rabo.algorithms.secants import SafeSteps
from rabo.algorithms.slopes import minus
from rabo.exchange.client import ClientContext
from rabo.exchange.covering import Covered
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import State
from rabo.exchange.work import Work, Works, levels, named
from rabo.hypergradients.linearisation import (
    LINEARISATIONS,
    Products,
    View,
    gradient,
)
from rabo.hypergradients.solvers import stretch
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.pruning.policies import Full, MaskPolicy
from rabo.tree import Params, as_tree, flatten, leaves


class Triple(NamedTuple):
    """Something for each of x, y and v."""

    x: Params
    y: Params
    v: Params

    @classmethod
    def of(cls, request: Request) -> "Triple":
        """Return x, y and v of a request."""
        return cls(*(request.arrays[name] for name in cls._fields))

    def minus(self, other: "Triple", x: float | Tensor, y: float | Tensor) -> "Triple":
        """Step along other with one size for x and one for y and v, whose curvature is the same."""
        return Triple(
            minus(self.x, other.x, x), minus(self.y, other.y, y), minus(self.v, other.v, y)
        )


class Directions(NamedTuple):
    """The slopes at a point, and the curvature along v."""

    slopes: Triple
    curvature: Tensor  # ‖∇²_yy g·v‖/‖v‖


def directions(view: View, at: Triple, products: Products = "exact") -> Directions:
    """∇_x f_i − ∇²_xy g_i·v for x, ∇_y g_i for y, and ∇²_yy g_i·v − ∇_y f_i for v."""
    system, v = LINEARISATIONS[products](view), flatten(leaves(at.v))
    found = system.apply(v)
    residual = as_tree(found.product - system.rhs, at.y)
    slopes = Triple(found.value, as_tree(system.inner_slope, at.y), residual)
    return Directions(slopes, stretch(found.product, v))


def view_at(problem: BilevelProblem, at: Triple, batch: Batch) -> View:
    """Look at f and g at a point, with the features of both in one pass."""
    return View(problem, at.x, at.y, batch, one_pass=True)


def inner_slope_of(view: View) -> Callable[[Tensor], Tensor]:
    """Return ∇_y g(x, ·) of a view, for flat y: random layers draw as they do there."""

    def slope(y: Tensor) -> Tensor:
        y = y.detach().requires_grad_()
        return gradient(view.inner(y), [y])[0]

    return slope


@dataclass(frozen=True, kw_only=True)
class Simultaneous(OuterLevel):
    """One loop for x, y and v: steps α for x, β for y and for v."""

    policy: MaskPolicy = field(default_factory=Full)  # as published

    needs_one_y: ClassVar[bool] = True
    products: ClassVar[Products] = "exact"
    sends_means: ClassVar[bool] = False  # over a client's steps, in place of sums

    def init(self, problem: BilevelProblem) -> State:
        state = super().init(problem)
        return replace(state, vectors={"v": {k: torch.zeros_like(t) for k, t in state.y.items()}})

    def sizes(self, state: State) -> dict[str, float]:
        """α, which is zero until x moves, and β."""
        alpha = self.alpha_in(state) if state.round >= self.warm_up else 0.0
        return {"alpha": alpha, "beta": state.scalars["beta"]}

    def gather(
        self, state: State, ask: Exchanges, num_steps: Callable[[int], int]
    ) -> Mapping[str, Covered]:
        """One exchange: the mean over clients of their slopes in x, y and v."""
        vectors = {"x": state.x, "y": state.y, "v": state.vectors["v"]}
        return ask.mean(self.take_steps, vectors, self.sizes(state), num_steps)

    @cached_property
    def take_steps(self) -> "TakeSteps":
        """τ_i local steps on x, y and v."""
        return TakeSteps(self.products, self.adapts_beta, self.sends_means, self.safe_numbers)

    @cached_property
    def works(self) -> Works:
        return named(MEASURE_CURVATURE, self.take_steps)

    def move(self, state: State, slopes: Mapping[str, Covered], scale: float) -> State:
        """Step on x, y and v with sizes scale·(α, β, β)."""
        y, v = slopes["y"], slopes["v"]
        if state.round >= self.warm_up:
            state = self.move_outer(state, slopes["x"], scale=scale)
        size = scale * state.scalars["beta"]
        vectors = {**state.vectors, "v": v.step(state.vectors["v"], size)}
        return replace(state, round=state.round + 1, y=y.step(state.y, size), vectors=vectors)


@dataclass(frozen=True)
class TakeSteps(Work):
    """On the client: τ_i steps, then q_i = Σ_k (slope of step k), or its mean."""

    products: Products
    adapts_beta: bool
    sends_means: bool
    numbers: tuple[str, ...] = ()

    name = "take_steps"
    takes = levels(x="x", y="y", v="y")
    answers = levels(x="x", y="y", v="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        at = Triple.of(request)
        total = at.minus(at, 1.0, 1.0)
        alpha, beta = request.scalars["alpha"], request.scalars["beta"]
        safe, steepest = SafeSteps(beta, flatten(leaves(at.y))), []
        for k in range(request.steps):
            view = view_at(client.problem, at, client.draw(request, k))
            found = directions(view, at, self.products)
            if k == 0 and self.adapts_beta:
                safe.probe(view.y, flatten(leaves(found.slopes.y)), inner_slope_of(view))
                beta = safe.size
            steepest.append(found.curvature)
            at = at.minus(found.slopes, alpha, beta)
            total = total.minus(found.slopes, -1.0, -1.0)
        curvature = torch.stack(steepest).max()
        sums = total._asdict()
        if self.sends_means:
            sums = {n: {k: t / request.steps for k, t in q.items()} for n, q in sums.items()}
        return Answer(sums, safe.seen(curvature) if self.adapts_beta else {})
