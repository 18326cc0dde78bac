"""Local SGD on one loss, on submodels: what all single-level algorithms share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from rabo.algorithms.base import Cohort, Cuts, State, spread
from rabo.algorithms.exchanges import Exchanges
from rabo.algorithms.inner import InnerLevel
from rabo.algorithms.steps import StepSize, check_step, size_at
from rabo.bilevel import Batch, BilevelProblem
from rabo.hypergradients.linearisation import check_loss, gradient
from rabo.runtimes.base import Local, Reply, Runtime, Task, answers
from rabo.tree import Params, as_leaves, leaves, plus, replace_leaves

Level: TypeAlias = Literal["x", "y"]
Weights: TypeAlias = Mapping[Level, Params]  # of a client


@dataclass(frozen=True, kw_only=True)
class SingleLevel(InnerLevel, ABC):
    """T local steps on one loss, averaged over the clients that held an entry; nobody: kept.

    Copies of y (one per task) start from y, and the mean of their changes is sent. Such a y has T
    steps to learn its task, while x goes on from round to round: it needs smaller ones.
    """

    beta_x: StepSize | None = None  # step size of x; None: beta, that of y

    kind: ClassVar[str] = "single level, submodels"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y"
    second_order: ClassVar[bool] = False
    needed: ClassVar[tuple[Level, ...]] = ("x", "y")  # what a client must get

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta == "auto" and "x" in self.trained:
            raise ValueError(
                "beta must be a number where x is trained too, got 'auto', which measures the "
                "curvature of g in y alone; 0.1 is usual for networks with norms"
            )
        if self.beta_x is not None:
            check_step("beta_x", self.beta_x)
        if self.beta_x is not None and len(self.trained) == 1:
            raise ValueError(
                f"beta_x is for training x beside y, got {self.beta_x} where {self.trained[0]} is "
                "trained alone; leave it out: the step size is beta. To train both, levels='both'"
            )

    @property
    @abstractmethod
    def trained(self) -> tuple[Level, ...]:
        """Return the levels that are trained."""

    @abstractmethod
    def loss(self, problem: BilevelProblem, at: Weights, batch: Batch, local: Local) -> Tensor:
        """Return the one loss."""

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure the curvature of g, where g in y is what is trained."""
        return super().prepare(state, cohort, runtime) if self.trained == ("y",) else state

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        sent = {level: getattr(state, level) for level in self.needed}
        rates = {"beta": state.scalars["beta"]}
        if self.beta_x is not None:
            rates["beta_x"] = size_at("beta_x", self.beta_x, state.round)
        ask = Exchanges(state, cuts, runtime, self.seed)
        moved = ask.mean(self.descend, sent, *self.trained, scalars=rates)
        pairs = zip(self.trained, moved, strict=True)
        trained: Any = {level: mean.step(getattr(state, level), 1.0) for level, mean in pairs}
        return replace(state, round=state.round + 1, **trained)

    def num_exchanges(self, state: State, cohort: Cohort) -> int:
        return 1

    @answers(lambda self: self.trained)
    def descend(self, task: Task, local: Local) -> Reply:
        """On the client: T steps on the submodel, then the way it went."""
        problem = self.seen(local.problem)
        start: Any = dict(task.arrays)
        if "y" in start:
            start["y"] = spread(start["y"], problem.copies)
        mask, beta = self.masking(task, local), task.scalars["beta"]
        rates = {"x": task.scalars.get("beta_x", beta), "y": beta}
        here, velocity = start, {}
        for t in range(self.num_inner_steps):
            moving = as_leaves({level: here[level] for level in self.trained})
            loss = self.loss(problem, mask({**here, **moving}), local.draw(task, t), local)
            if t == 0:
                check_loss("training", loss)
            slopes = replace_leaves(moving, gradient(loss, leaves(moving)))
            velocity = {n: self.accelerate(velocity.get(n, {}), slopes[n]) for n in moving}
            here = {**here, **{n: plus(moving[n], -rates[n], velocity[n]) for n in moving}}
        change = {n: {k: v - here[n][k] for k, v in start[n].items()} for n in self.trained}
        if "y" in change and problem.copies > 1:
            change["y"] = {k: v.mean(dim=0) for k, v in change["y"].items()}
        return Reply(change)

    def seen(self, problem: BilevelProblem) -> BilevelProblem:
        """Return the problem as the local steps see it."""
        return problem

    def masking(self, task: Task, local: Local) -> Callable[[Weights], Weights]:
        """Return what turns weights into those of a forward pass: the identity as a rule."""
        return lambda weights: weights
