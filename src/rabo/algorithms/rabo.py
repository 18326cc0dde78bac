"""Resource-adaptive distributed bilevel optimisation (Algorithm 1)."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from rabo.algorithms.base import Cohort, Cuts, State, draw, spread
from rabo.algorithms.curvature import largest_curvature
from rabo.algorithms.global_hessian import GlobalHessian
from rabo.hypergradients import ConjugateGradient, HypergradientEstimator
from rabo.hypergradients.linearisation import gradient
from rabo.masks import Importance, MaskPolicy
from rabo.problem import BilevelProblem
from rabo.runtimes.base import Local, Reply, Runtime, Task
from rabo.seeding import stream
from rabo.submodel import CoveredMean
from rabo.tree import as_leaves, leaves


class StepSizeWarning(UserWarning):
    """A step size for which the inner problem cannot converge."""


@dataclass(frozen=True, kw_only=True)
class RABO(GlobalHessian):
    """Resource-adaptive distributed bilevel optimisation (Algorithm 1).

    x outer, y inner; every client trains only what its masks keep.
    """

    hypergradient: HypergradientEstimator = field(default_factory=ConjugateGradient)
    hessian: Literal["local", "global"] = "local"
    policy: MaskPolicy = field(default_factory=Importance)
    alpha: float = 0.1
    beta: float | Literal["auto"] = "auto"
    num_inner_steps: int = 5  # T
    calibrate_every: int = 10  # rounds between measurements of l_{g,1} when β is "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if self.beta != "auto" and not self.beta > 0:
            raise ValueError(f"beta must be positive or 'auto', got {self.beta}")
        if self.num_inner_steps < 1:
            raise ValueError(f"num_inner_steps must be at least 1, got {self.num_inner_steps}")
        if self.calibrate_every < 1:
            raise ValueError(f"calibrate_every must be at least 1, got {self.calibrate_every}")
        if self.hessian not in ("local", "global"):
            raise ValueError(f"hessian must be local or global, got {self.hessian!r}")
        if self.hessian == "global" and not hasattr(self.hypergradient, "linearise"):
            raise ValueError(
                "hessian='global' solves one linear system over all clients and needs an estimator "
                "that does (conjugate-gradient, neumann, directional-difference), got "
                f"{type(self.hypergradient).__name__}"
            )

    def init(self, problem: BilevelProblem) -> State:
        x, y = problem.start()
        return State(0, x, y)

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure l_{g,1}; warn where β is beyond 2/l_{g,1}."""
        cuts = Cuts(self.policy, state, cohort, self.seed)
        largest = largest_curvature(state, cuts, runtime, self.seed)
        if self.beta != "auto" and self.beta > 2 / largest:
            warnings.warn(
                f"beta = {self.beta:g} exceeds 2/l_g1 = {2 / largest:g}: the inner steps diverge. "
                f"Use beta = {1 / (2 * largest):.3g} (1/(2 l_g1)), or beta='auto'.",
                StepSizeWarning,
                stacklevel=3,
            )
        return replace(state, scalars={**state.scalars, "largest_curvature": largest})

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """One global iteration q (Algorithm 1, lines 3-33)."""
        cuts = Cuts(self.policy, state, cohort, self.seed)  # lines 4-5
        state = self._calibrated(state, cuts, runtime)

        moved, answered = CoveredMean(state.y), set()
        for client, reply in runtime.map(self.update_inner, self._inner_tasks(state, cuts)):
            moved.add(cuts[client].y, reply.arrays["y"])  # lines 6-10
            answered.add(client)
        y = moved.step(state.y, 1.0)  # lines 12-20

        slope = CoveredMean(state.x)
        for client, reply in self._outer(replace(state, y=y), cuts, answered, runtime):
            slope.add(cuts[client].x, reply.arrays["x"])  # lines 21-24
        x = slope.step(state.x, self.alpha)  # lines 25-33
        return replace(state, round=state.round + 1, x=x, y=y)

    def _inner_tasks(self, state: State, cuts: Cuts) -> Iterator[tuple[int, Task]]:
        beta = {"beta": state.scalars["beta"]}
        x, y = cuts.extract("x", state.x), cuts.extract("y", state.y)
        for client, cut in cuts.items():
            yield client, Task(self.seed, state.round, cut, {"x": x(client), "y": y(client)}, beta)

    def _outer(
        self, state: State, cuts: Cuts, answered: set[int], runtime: Runtime
    ) -> Iterator[tuple[int, Reply]]:
        """Lines 21-24: the hypergradients of the clients that hold x_q."""
        if self.hessian == "global":
            return self.solve_globally(state, cuts, answered, runtime)
        y = cuts.extract("y", state.y)
        tasks = (
            (client, Task(self.seed, state.round, cuts[client], {"y": y(client)}))
            for client in answered
        )
        return runtime.map(self.estimate_outer, tasks)

    def _calibrated(self, state: State, cuts: Cuts, runtime: Runtime) -> State:
        """Set β: as given, or 1/(2 l_{g,1}) as measured last."""
        if self.beta != "auto":
            return replace(state, scalars={**state.scalars, "beta": self.beta})
        largest = state.scalars.get("largest_curvature", 0.0)
        if not largest or (state.round and state.round % self.calibrate_every == 0):
            largest = largest_curvature(state, cuts, runtime, self.seed)
        scalars = {"largest_curvature": largest, "beta": 1 / (2 * largest)}
        return replace(state, scalars={**state.scalars, **scalars})

    def update_inner(self, task: Task, local: Local) -> Reply:
        """Lines 6-10, on the client: T steps on the submodel, then the way it went.

        Departs from line 10, whose sign would make line 18 step uphill, and sends y_0 − y_T itself:
        β cancels.
        """
        problem, x = local.problem, task.arrays["x"]
        start = spread(task.arrays["y"], problem.copies)
        y, data, z, beta = start, None, None, task.scalars["beta"]
        for t in range(self.num_inner_steps):
            batch = draw(local, task, t)
            if t == 0 or batch.inner is not data:  # features of the same data serve all steps
                data = batch.inner
                with torch.no_grad():
                    z = problem.features(x, data)
            y = as_leaves(y)
            slope = gradient(problem.inner(z, y, data), leaves(y))  # line 7
            y = {k: v.detach() - beta * s for (k, v), s in zip(y.items(), slope, strict=True)}
        local.memory["x"] = x
        change = {k: start[k] - y[k] for k in start}
        if problem.copies > 1:
            local.memory["y"] = y
            change = {k: v.mean(dim=0) for k, v in change.items()}
        return Reply({"y": change})

    def estimate_outer(self, task: Task, local: Local) -> Reply:
        """Lines 22-23, on the client: the hypergradient at y_{q+1}, or at its own copies of y."""
        x, y = local.memory["x"], local.memory.get("y", task.arrays["y"])
        batch = draw(local, task, "outer")
        generator = stream(self.seed, task.round, local.client, "estimate")
        found = self.hypergradient(local.problem, x, y, batch, generator)
        return Reply({"x": found.value}, {"residual": float(found.residual)})
