"""Lines 4-20 of Algorithm 1: local steps on y, and the mean over the clients that held an entry."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rabo.algorithms.curvature import largest_curvature
from rabo.algorithms.secants import BACKTRACKS, SafeSteps, on_rows
from rabo.algorithms.slopes import inner_slope_on, sees_again
from rabo.algorithms.steps import StepSize, check_step, size_at
from rabo.errors import NonFiniteError
from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import CURVATURE, INNER_DISAGREEMENT, Cohort, Cuts, State, spread
from rabo.exchange.work import Runtime, Work, levels
from rabo.hypergradients.linearisation import one_realisation
from rabo.problems.bilevel import BilevelProblem
from rabo.pruning.policies import Importance, MaskPolicy
from rabo.tree import Params, as_tree, flatten, leaves, plus

FADING = 0.9  # of the curvature that a round has not seen


class StepSizeWarning(UserWarning):
    """A step size for which the inner problem cannot converge."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Who holds what, and the step size β: a number, a function of the round, or measured."""

    needs_one_y: ClassVar[bool] = False
    is_episodic: ClassVar[bool] = False
    uses_local_hessians: ClassVar[bool] = False  # biased where clients differ (erratum 6)
    needs_outer: ClassVar[bool] = True  # whether a problem of one loss is refused

    policy: MaskPolicy = field(default_factory=Importance)
    beta: StepSize | Literal["auto"] = "auto"
    calibrate_every: int | None = None  # rounds between measurements of l_{g,1}; None: one at first
    seed: int = 0

    def __post_init__(self) -> None:
        if self.beta != "auto":
            check_step("beta", self.beta, also=" or 'auto'")
        if isinstance(self.policy, (str, type)):
            raise ValueError(f"policy must be an object such as Rolling(), got {self.policy!r}")
        if self.calibrate_every is not None and self.calibrate_every < 1:
            raise ValueError(f"calibrate_every must be at least 1, got {self.calibrate_every}")

    def init(self, problem: BilevelProblem) -> State:
        if self.needs_outer and getattr(problem, "has_one_loss", False):
            raise ValueError(
                f"{type(self).__name__} needs an inner and an outer loss, got a problem of one "
                "loss; give Problem(inner=..., outer=...), or use fedavg or static"
            )
        if self.needs_one_y and problem.copies > 1:
            raise ValueError(
                f"{type(self).__name__} averages vectors in y over clients and needs one y for "
                f"all, got a problem with {problem.copies} copies of y (one per task); use fedmbo, "
                "rabo or rafbo, or let tasks share y (--heads shared in few-shot)"
            )
        x, y = problem.start()
        return State(0, x, y)

    @property
    def step_over_beta(self) -> float:
        """The length of an inner step over β."""
        return 1.0

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure l_{g,1}; warn where an inner step is longer than 2/l_{g,1}."""
        if callable(self.beta):
            return state  # a schedule is chosen by hand, for problems that are not convex
        cuts = Cuts(self.policy, state, cohort, self.seed)
        largest = largest_curvature(state, cuts, runtime, self.seed)
        if self.beta != "auto" and self.beta * self.step_over_beta * largest > 2:
            limit, number = 2 / (self.step_over_beta * largest), 1 / self.step_over_beta
            name, why = "2/l_g1", ""
            if number != 1:
                name, why = "2τ/l_g1", f" (τ = {number:g} local steps)"
            warnings.warn(
                f"beta = {self.beta:g} exceeds {name} = {limit:g}{why}: the inner steps diverge. "
                f"Use beta = {1 / (2 * largest):.3g} (1/(2 l_g1)), or beta='auto'.",
                StepSizeWarning,
                stacklevel=3,
            )
        return replace(state, scalars={**state.scalars, "largest_curvature": largest})

    @property
    def adapts_beta(self) -> bool:
        """Whether β is automatic, so that clients may shrink it."""
        return self.beta == "auto"

    @property
    def safe_numbers(self) -> tuple[str, ...]:
        """Names of the scalars in replies with steps on y."""
        return (CURVATURE, BACKTRACKS) if self.adapts_beta else ()

    def with_beta(self, state: State, cuts: Cuts, runtime: Runtime) -> State:
        """Set β: as given, or 1/(2 l_{g,1}) as measured last."""
        if self.beta != "auto":
            beta = size_at("beta", self.beta, state.round)
            return replace(state, scalars={**state.scalars, "beta": beta})
        state = self.with_curvature(state, cuts, runtime)
        beta = 1 / (2 * state.scalars["largest_curvature"])
        return replace(state, scalars={**state.scalars, "beta": beta})

    def with_curvature(self, state: State, cuts: Cuts, runtime: Runtime) -> State:
        """Measure l_{g,1} where it is not known yet, and anew every `calibrate_every` rounds."""
        largest = state.scalars.get("largest_curvature", 0.0)
        every = self.calibrate_every
        if not largest or (every and state.round and state.round % every == 0):
            largest = largest_curvature(state, cuts, runtime, self.seed) or largest
        if not largest > 0:
            raise NonFiniteError(
                f"the inner losses must be curved in y to choose beta, got l_g1 = {largest:g}; add "
                "a regulariser to the inner loss, or give beta as a number"
            )
        return replace(state, scalars={**state.scalars, "largest_curvature": largest})

    @property
    def follows_curvature(self) -> bool:
        """Whether anything depends on the curvature of later rounds."""
        return self.adapts_beta

    def follow_curvature(self, state: State, *asked: Exchanges) -> State:
        """Take l_{g,1} of the next round from the secants and products of this one.

        The bound fades by a tenth a round: once y has converged along sharp directions, its steps
        see flat ones only.
        """
        seen = max(ask.largest_curvature() for ask in asked)
        if not self.follows_curvature or not seen:
            return state
        largest = max(seen, FADING * state.scalars["largest_curvature"])
        return replace(state, scalars={**state.scalars, "largest_curvature": largest})

    def shorten(self, state: State, ask: Exchanges) -> State:
        """Reduce β to 1/(2·curvature) if the curvature seen in this round exceeds 1/β."""
        seen = ask.largest_curvature()
        if not self.adapts_beta or seen * state.scalars["beta"] <= 1:
            return state
        return replace(state, scalars={**state.scalars, "beta": 1 / (2 * seen)})


@dataclass(frozen=True, kw_only=True)
class InnerLevel(Calibrated):
    """T local steps on y with step size β."""

    momentum: float = 0.0  # of the inner steps; starts from zero in every round
    num_inner_steps: int = 5  # T

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.num_inner_steps < 1:
            raise ValueError(f"num_inner_steps must be at least 1, got {self.num_inner_steps}")

    @cached_property
    def inner_steps(self) -> "InnerSteps":
        """The local steps of a client on y."""
        return InnerSteps(self.num_inner_steps, self.momentum, self.adapts_beta)

    @cached_property
    def update_inner(self) -> "UpdateInner":
        """Lines 6-10, on the client."""
        return UpdateInner(self.inner_steps, self.separable, self.safe_numbers)

    def train_inner(self, state: State, ask: Exchanges) -> State:
        """Lines 6-20, one exchange: y_{q+1}."""
        here, beta = {"x": state.x, "y": state.y}, {"beta": state.scalars["beta"]}
        moved = ask.mean(self.update_inner, here, scalars=beta)["y"]  # lines 6-10
        scalars = {**state.scalars, INNER_DISAGREEMENT: float(moved.disagreement())}
        return replace(state, y=moved.step(state.y, 1.0), scalars=scalars)  # lines 12-20

    @property
    def separable(self) -> bool:
        """Whether clients of one submodel can be asked as one where every task has its own y."""
        return False


@dataclass(frozen=True)
class UpdateInner(Work):
    """Lines 6-10, on the client: T steps on the submodel, then the way it went.

    Departs from line 10, whose sign would make line 18 step uphill, and sends y_0 − y_T itself:
    β cancels.
    """

    steps: "InnerSteps"
    separable: bool = False
    numbers: tuple[str, ...] = ()

    name = "update_inner"
    takes = levels(x="x", y="y")
    answers = levels(y="y")

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        x, copies = request.arrays["x"], client.problem.copies
        start = spread(request.arrays["y"], copies)
        y, seen = self.steps.take(request, client, x, start, lambda t: t)
        client.memory["x"] = x
        change = {k: start[k] - y[k] for k in start}
        if copies > 1:
            client.memory["y"] = y
            change = {k: v.mean(dim=0) for k, v in change.items()}
        return Answer({"y": change}, seen)


@dataclass(frozen=True)
class InnerSteps:
    """T steps on y at fixed x (lines 6-8).

    With an automatic β, a step along which the gradient changes by more than 1/β is taken back.
    """

    number: int  # T
    momentum: float
    adapts_beta: bool

    def take(
        self,
        request: Request,
        client: ClientContext,
        x: Params,
        y: Params,
        purpose: Callable[[int], str | int],
    ) -> tuple[Params, dict[str, Tensor]]:
        """Return y and numbers for the answer; purpose(t) names the batch of step t."""
        if self.adapts_beta:
            return self._take_safely(request, client, x, y, purpose)
        data, velocity, slope_at = None, {}, None
        for t in range(self.number):
            batch = client.draw(request, purpose(t))
            if slope_at is None or batch.inner is not data:
                data, slope_at = batch.inner, inner_slope_on(client.problem, x, batch.inner)
            velocity = accelerate(velocity, slope_at(y, t == 0), self.momentum)  # line 7
            y = plus(y, -request.scalars["beta"], velocity)
        return y, {}

    def _take_safely(
        self,
        request: Request,
        client: ClientContext,
        x: Params,
        y: Params,
        purpose: Callable[[int], str | int],
    ) -> tuple[Params, dict[str, Tensor]]:
        """Take T steps with a β that secants bound; one more gradient where batches change."""
        problem, seed = client.problem, torch.default_generator.initial_seed()
        is_random = getattr(problem, "has_random_layers", False)
        like, at = y, flatten(leaves(y), problem.copies)
        data, velocity, slope_at = None, None, None
        safe = SafeSteps(request.scalars["beta"], at)
        for t in range(self.number):
            batch = client.draw(request, purpose(t))
            if slope_at is None or batch.inner is not data:
                data, named = batch.inner, inner_slope_on(problem, x, batch.inner)
                slope_at = on_rows(named, like, problem.copies)
                safe.forget()
            elif is_random:  # other draws, another function
                safe.forget()
            with one_realisation(problem, seed + t, like):
                slope = slope_at(at, t == 0)
            if t == 0 and (is_random or self.number == 1 or not sees_again(client, batch, "inner")):
                with one_realisation(problem, seed, like):
                    safe.probe(at, slope, slope_at)
            at, slope, back = safe.check(at, slope)
            if velocity is None or not self.momentum:
                velocity = slope
            else:
                kept = velocity if back is None else velocity.masked_fill(back, 0.0)
                velocity = torch.add(slope, kept, alpha=self.momentum)
            at = safe.step(at, velocity)
        return as_tree(at, like), safe.seen()


def accelerate(velocity: Params, slope: Params, momentum: float) -> Params:
    """Return the direction of the next step; no velocity yet is an empty one."""
    if not velocity or not momentum:
        return slope
    return plus(slope, momentum, velocity)
