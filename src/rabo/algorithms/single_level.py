"""Local SGD on one loss, on submodels: what all single-level algorithms share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from rabo.algorithms.base import Cohort, Cuts, State, spread
from rabo.algorithms.inner import InnerLevel
from rabo.hypergradients.linearisation import check_loss, gradient
from rabo.masks import Full
from rabo.problem import Batch, BilevelProblem
from rabo.runtimes.base import Local, Reply, Runtime, Task
from rabo.submodel import CoveredMean
from rabo.tree import Params, as_leaves, leaves, replace_leaves

Level: TypeAlias = Literal["x", "y"]
Weights: TypeAlias = Mapping[Level, Params]  # of a client


@dataclass(frozen=True, kw_only=True)
class SingleLevel(InnerLevel):
    """T local steps on one loss, averaged over the clients that held an entry; nobody: kept.

    With `levels="y"` the loss is g and x stays where it starts: in loss tuning, the untuned loss.
    With `levels="both"` x and y are one network, trained on the mean of g and f: ordinary
    supervised training on all data. Copies of y (one per task) start from y, and the mean of their
    changes is sent.
    """

    levels: Literal["both", "y"] = "y"

    kind: ClassVar[str] = "single level, submodels"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y"
    second_order: ClassVar[bool] = False
    own_policy: ClassVar[type | None] = None  # of algorithms that are what their masks are

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels not in ("both", "y"):
            raise ValueError(f"levels must be both or y, got {self.levels!r}")
        if self.beta == "auto" and "x" in self.trained:
            raise ValueError(
                "beta must be a number where x is trained too, got 'auto', which measures the "
                "curvature of g in y alone; 0.1 is usual for networks with norms"
            )
        if self.own_policy and not isinstance(self.policy, (self.own_policy, Full)):
            raise ValueError(
                f"{type(self).__name__} keeps what {self.own_policy.__name__}() keeps, got policy "
                f"{self.policy!r}; fedavg takes any policy"
            )

    @property
    def trained(self) -> tuple[Level, ...]:
        return ("x", "y") if self.levels == "both" else ("y",)

    def loss(self, problem: BilevelProblem, at: Weights, batch: Batch, local: Local) -> Tensor:
        """Return the one loss: g, or the mean of g and f."""
        if self.levels == "y":
            return problem.inner(_fixed_features(problem, at["x"], batch, local), at["y"], batch[0])
        inner = problem.inner(problem.features(at["x"], batch.inner), at["y"], batch.inner)
        outer = problem.outer(problem.features(at["x"], batch.outer), at["y"], batch.outer)
        return (inner + outer) / 2

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure the curvature of g, where g in y is what is trained."""
        return super().prepare(state, cohort, runtime) if self.trained == ("y",) else state

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self._with_beta(state, cuts, runtime)
        moved = {level: CoveredMean(getattr(state, level)) for level in self.trained}
        for client, reply in runtime.map(self.descend, self._tasks(state, cuts)):
            for level, mean in moved.items():
                mean.add(getattr(cuts[client], level), reply.arrays[level])
        trained: Any = {level: m.step(getattr(state, level), 1.0) for level, m in moved.items()}
        return replace(state, round=state.round + 1, **trained)

    def num_exchanges(self, state: State, cohort: Cohort) -> int:
        return 1

    def _tasks(self, state: State, cuts: Cuts) -> Iterator[tuple[int, Task]]:
        return self._inner_tasks(state, cuts)

    def descend(self, task: Task, local: Local) -> Reply:
        """On the client: T steps on the submodel, then the way it went."""
        problem = self.seen(local.problem)
        start: Any = dict(task.arrays)
        if "y" in start:
            start["y"] = spread(start["y"], problem.copies)
        mask, beta = self.masking(task, local), task.scalars["beta"]
        here, velocity = start, None
        for t in range(self.num_inner_steps):
            moving = as_leaves({level: here[level] for level in self.trained})
            loss = self.loss(problem, mask({**here, **moving}), local.draw(task, t), local)
            if t == 0:
                check_loss("training", loss)
            velocity = self._accelerate(velocity, gradient(loss, leaves(moving)))
            pairs = zip(leaves(moving), velocity, strict=True)
            here = {**here, **replace_leaves(moving, [w.detach() - beta * v for w, v in pairs])}
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


def _fixed_features(problem: BilevelProblem, x: Params, batch: Batch, local: Local) -> Any:
    """Return z(x) of an x that stays: the same data serve all steps."""
    if local.memory.get("data") is not batch.inner or "z" not in local.memory:
        local.memory.update(data=batch.inner, z=problem.features(x, batch.inner))
    return local.memory["z"]
