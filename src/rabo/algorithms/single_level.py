"""Local SGD on one loss, on submodels: what all single-level algorithms share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor

from rabo.algorithms.curvature import MEASURE_CURVATURE
from rabo.algorithms.inner import InnerLevel, accelerate
from rabo.algorithms.steps import StepSize, check_step, size_at
from rabo.exchange.client import ClientContext
from rabo.exchange.exchanges import Exchanges
from rabo.exchange.request import Answer, Request
from rabo.exchange.state import Cohort, Cuts, State, spread
from rabo.exchange.work import Levels, Runtime, Work, Works, named
from rabo.hypergradients.linearisation import check_loss, gradient
from rabo.problems.bilevel import Batch, BilevelProblem
from rabo.tree import Params, as_leaves, leaves, map_leaves, plus, replace_leaves, squared_norm

Level: TypeAlias = Literal["x", "y"]
Weights: TypeAlias = Mapping[Level, Params]  # of a client
Rows: TypeAlias = Mapping[str, Mapping[str, Sequence[int]]]  # by array and tensor

JOINT_BETA = 0.1  # where x is trained and no step size is given
CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
TRAINING_LOSS = "training_loss"  # on a client's first batch, before its first step


@dataclass(frozen=True, kw_only=True)
class SingleLevel(InnerLevel, ABC):
    """T local steps on one loss, averaged over the clients that held an entry; nobody: kept.

    Copies of y (one per task) start from y, and the mean of their changes is sent. Such a y has T
    steps to learn its task, while x goes on from round to round: it needs smaller ones.
    beta="auto" measures the curvature in y where y is trained alone, and is 0.1 elsewhere.
    """

    calibrate_every: int | None = 10  # no secants are taken here

    beta_x: StepSize | None = None  # step size of x; None: beta, that of y
    clip_gradients: float | None = None  # L2 norm of a client's gradient, x and y together
    weight_decay: float = 0.0  # added to the gradient after clipping, times the weights

    kind: ClassVar[str] = "single level, submodels"
    exchanges: ClassVar[str] = "1"
    vectors: ClassVar[str] = "x, y"
    second_order: ClassVar[bool] = False
    needed: ClassVar[tuple[Level, ...]] = ("x", "y")  # what a client must get
    needs_outer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_x is not None:
            check_step("beta_x", self.beta_x)
        if self.beta_x is not None and len(self.trained) == 1:
            raise ValueError(
                f"beta_x is for training x beside y, got {self.beta_x} where {self.trained[0]} is "
                "trained alone; leave it out: the step size is beta. To train both, levels='both'"
            )

        if self.clip_gradients is not None and not self.clip_gradients > 0:
            raise ValueError(f"clip_gradients must be positive, got {self.clip_gradients}")
        if not 0 <= self.weight_decay < inf:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")

    @property
    @abstractmethod
    def trained(self) -> tuple[Level, ...]:
        """Return the levels that are trained."""

    @abstractmethod
    def loss(
        self, problem: BilevelProblem, at: Weights, batch: Batch, client: ClientContext
    ) -> Tensor:
        """Return the one loss."""

    def prepare(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        """Measure the curvature of g, where g in y is what is trained."""
        return super().prepare(state, cohort, runtime) if self.trained == ("y",) else state

    def with_beta(self, state: State, cuts: Cuts, runtime: Runtime) -> State:
        if self.beta == "auto" and "x" in self.trained:
            return replace(state, scalars={**state.scalars, "beta": JOINT_BETA})
        return super().with_beta(state, cuts, runtime)

    def round(self, state: State, cohort: Cohort, runtime: Runtime) -> State:
        cuts = Cuts(self.policy, state, cohort, self.seed)
        state = self.with_beta(state, cuts, runtime)
        sent = {level: getattr(state, level) for level in self.needed}
        rates = {"beta": state.scalars["beta"]}
        if self.beta_x is not None:
            rates["beta_x"] = size_at("beta_x", self.beta_x, state.round)
        ask = Exchanges(state, cuts, runtime, self.seed)
        moved = ask.mean(self.descend, sent, rates)
        trained: Any = {n: mean.step(getattr(state, n), 1.0) for n, mean in moved.items()}
        return replace(state, round=state.round + 1, **trained)

    @cached_property
    def works(self) -> Works:
        calibration = (MEASURE_CURVATURE,) if self.trained == ("y",) else ()
        return named(*calibration, self.descend)

    @cached_property
    def descend(self) -> "Descend":
        """T local steps."""
        takes: Levels = {level: level for level in self.needed}
        answers: Levels = {level: level for level in self.trained}
        return Descend(self, takes, answers, self.separable)

    def seen(self, problem: BilevelProblem) -> BilevelProblem:
        """Return the problem as the local steps see it."""
        return problem

    def adjusted(self, slopes: Any, weights: Any) -> Any:
        """Clip the gradient, then add the weight decay, as torch.optim.SGD does."""
        if self.clip_gradients is not None:
            norm = squared_norm(slopes).sqrt()
            shrink = (self.clip_gradients / (norm + CLIP_EPS)).clamp(max=1)
            slopes = map_leaves(lambda t: shrink.to(t.dtype) * t, slopes)
        if self.weight_decay:
            slopes = {n: plus(slopes[n], self.weight_decay, weights[n]) for n in slopes}
        return slopes

    def reported(self, problem: Any, loss: Tensor) -> Tensor:
        """Return the training loss of one client, given the loss of its first step."""
        return loss.detach()

    def rows_of(self, problem: BilevelProblem) -> Rows:
        """Return the rows that the server averages, by array and tensor; {} means all."""
        return {}

    def masking(self, request: Request, client: ClientContext) -> Callable[[Weights], Weights]:
        """Return what turns weights into those of a forward pass: the identity as a rule."""
        return lambda weights: weights


@dataclass(frozen=True)
class Descend(Work):
    """On the client: T steps on the submodel, then the way it went."""

    method: SingleLevel
    takes: Levels = field(hash=False)
    answers: Levels = field(hash=False)
    separable: bool = False

    name = "descend"
    numbers = (TRAINING_LOSS,)

    def __call__(self, request: Request, client: ClientContext) -> Answer:
        method, trained = self.method, self.method.trained
        problem = method.seen(client.problem)
        start: Any = dict(request.arrays)
        if "y" in start:
            start["y"] = spread(start["y"], problem.copies)
        mask, beta = method.masking(request, client), request.scalars["beta"]
        rates = {"x": request.scalars.get("beta_x", beta), "y": beta}
        here, velocity, first = start, {}, None
        for t in range(method.num_inner_steps):
            moving = as_leaves({level: here[level] for level in trained})
            batch = client.draw(request, t)
            loss = method.loss(problem, mask({**here, **moving}), batch, client)
            if first is None:
                check_loss("training", loss)
                first = method.reported(problem, loss)
            slopes = replace_leaves(moving, gradient(loss, leaves(moving)))
            slopes = method.adjusted(slopes, moving)
            velocity = {
                n: accelerate(velocity.get(n, {}), slopes[n], method.momentum) for n in moving
            }
            here = {**here, **{n: plus(moving[n], -rates[n], velocity[n]) for n in moving}}
        change = {n: {k: v - here[n][k] for k, v in start[n].items()} for n in trained}
        if "y" in change and problem.copies > 1:
            change["y"] = {k: v.mean(dim=0) for k, v in change["y"].items()}
        return Answer(change, {TRAINING_LOSS: first}, method.rows_of(client.problem))
