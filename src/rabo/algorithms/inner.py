"""Lines 4-20 of Algorithm 1: local steps on y, and the mean over the clients that held an entry."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from rabo.algorithms.base import Cohort, Cuts, State, spread
from rabo.algorithms.curvature import largest_curvature
from rabo.algorithms.exchanges import Exchanges
from rabo.algorithms.steps import StepSize, check_step, size_at
from rabo.bilevel import BilevelProblem
from rabo.errors import NonFiniteError
from rabo.hypergradients.linearisation import check_loss, gradient
from rabo.masks import Importance, MaskPolicy
from rabo.runtimes.base import Local, Reply, Runtime, Task, answers
from rabo.tree import Params, as_leaves, leaves, plus


class StepSizeWarning(UserWarning):
    """A step size for which the inner problem cannot converge."""


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Who holds what, and the step size β: a number, a function of the round, or measured."""

    needs_one_y: ClassVar[bool] = False
    is_episodic: ClassVar[bool] = False

    policy: MaskPolicy = field(default_factory=Importance)
    beta: StepSize | Literal["auto"] = "auto"
    calibrate_every: int = 10  # rounds between measurements of l_{g,1}
    seed: int = 0

    def __post_init__(self) -> None:
        if self.beta != "auto":
            check_step("beta", self.beta, also=" or 'auto'")
        if isinstance(self.policy, (str, type)):
            raise ValueError(f"policy must be an object such as Rolling(), got {self.policy!r}")
        if self.calibrate_every < 1:
            raise ValueError(f"calibrate_every must be at least 1, got {self.calibrate_every}")

    def init(self, problem: BilevelProblem) -> State:
        if self.needs_one_y and problem.copies > 1:
            raise ValueError(
                f"{type(self).__name__} averages vectors in y over clients and needs one y for "
                f"all, got a problem with {problem.copies} copies of y (one per task); use fedmbo, "
                "rabo or rafbo, or let tasks share y (--heads shared in few-shot)"
            )
        x, y = problem.start()
        return State(0, x, y)

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure l_{g,1}; warn where β is beyond 2/l_{g,1}."""
        if callable(self.beta):
            return state  # a schedule is chosen by hand, for problems that are not convex
        cuts = Cuts(self.policy, state, cohort, self.seed)
        largest = largest_curvature(state, cuts, runtime, self.seed)
        if self.beta != "auto" and self.beta * largest > 2:
            warnings.warn(
                f"beta = {self.beta:g} exceeds 2/l_g1 = {2 / largest:g}: the inner steps diverge. "
                f"Use beta = {1 / (2 * largest):.3g} (1/(2 l_g1)), or beta='auto'.",
                StepSizeWarning,
                stacklevel=3,
            )
        return replace(state, scalars={**state.scalars, "largest_curvature": largest})

    def with_beta(self, state: State, cuts: Cuts, runtime: Runtime) -> State:
        """Set β: as given, or 1/(2 l_{g,1}) as measured last."""
        if self.beta != "auto":
            beta = size_at("beta", self.beta, state.round)
            return replace(state, scalars={**state.scalars, "beta": beta})
        state = self.with_curvature(state, cuts, runtime)
        beta = 1 / (2 * state.scalars["largest_curvature"])
        return replace(state, scalars={**state.scalars, "beta": beta})

    def with_curvature(self, state: State, cuts: Cuts, runtime: Runtime) -> State:
        """Measure l_{g,1} where it is not known yet, and anew every few rounds."""
        largest = state.scalars.get("largest_curvature", 0.0)
        if not largest or (state.round and state.round % self.calibrate_every == 0):
            largest = largest_curvature(state, cuts, runtime, self.seed) or largest
        if not largest > 0:
            raise NonFiniteError(
                f"the inner losses must be curved in y to choose beta, got l_g1 = {largest:g}; add "
                "a regulariser to the inner loss, or give beta as a number"
            )
        return replace(state, scalars={**state.scalars, "largest_curvature": largest})


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

    def train_inner(self, state: State, ask: Exchanges) -> State:
        """Lines 6-20, one exchange: y_{q+1}."""
        here, beta = {"x": state.x, "y": state.y}, {"beta": state.scalars["beta"]}
        [moved] = ask.mean(self.update_inner, here, "y", scalars=beta)  # lines 6-10
        return replace(state, y=moved.step(state.y, 1.0))  # lines 12-20

    @answers("y")
    def update_inner(self, task: Task, local: Local) -> Reply:
        """Lines 6-10, on the client: T steps on the submodel, then the way it went.

        Departs from line 10, whose sign would make line 18 step uphill, and sends y_0 − y_T itself:
        β cancels.
        """
        x, start = task.arrays["x"], spread(task.arrays["y"], local.problem.copies)
        y = self.follow(task, local, x, start, lambda t: t)
        local.memory["x"] = x
        change = {k: start[k] - y[k] for k in start}
        if local.problem.copies > 1:
            local.memory["y"] = y
            change = {k: v.mean(dim=0) for k, v in change.items()}
        return Reply({"y": change})

    def follow(
        self, task: Task, local: Local, x: Params, y: Params, purpose: Callable[[int], str | int]
    ) -> Params:
        """T steps on y where x is (lines 6-8), each with the data of its purpose."""
        problem, data, z, velocity = local.problem, None, None, {}
        for t in range(self.num_inner_steps):
            batch = local.draw(task, purpose(t))
            if t == 0 or batch.inner is not data:  # features of the same data serve all steps
                data = batch.inner
                with torch.no_grad():
                    z = problem.features(x, data)
            y = as_leaves(y)
            loss = problem.inner(z, y, data)
            if t == 0:
                check_loss("inner", loss)
            slope = dict(zip(y, gradient(loss, leaves(y)), strict=True))  # line 7
            velocity = self.accelerate(velocity, slope)
            y = plus(y, -task.scalars["beta"], velocity)
        return y

    def accelerate(self, velocity: Params, slope: Params) -> Params:
        """Return the direction of the next inner step; no velocity yet is an empty one."""
        if not velocity or not self.momentum:
            return slope
        return plus(slope, self.momentum, velocity)
