"""Dist-MAML: a start from which all parameters adapt to a task, averaged over clients."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.func import grad, vmap

from rabo.algorithms.episodic import Episodic
from rabo.algorithms.single_level import Level, Weights
from rabo.bilevel import Batch
from rabo.problem import ClientProblem
from rabo.runtimes.base import Local
from rabo.tree import Params, leaves, map_leaves

CHUNK = 10  # test tasks whose adapted networks are held at once


@dataclass(frozen=True, kw_only=True)
class DistMAML(Episodic):
    """Local SGD on f after K steps of size η on g, of x and y together, from a shared start.

    w_j ← w − η∇g_j(w), K times for every task j; the loss is the mean of f_j(w_j), differentiated
    through all steps (Finn et al., 2017). A test task is met with the same steps.

    Departs from Finn et al., who have one η, where `adapt_rate_x` is given: slopes of a head fall
    with the number of classes, those of a backbone with norms do not.
    """

    adapt_steps: int = 5  # K
    adapt_rate: float = 0.4  # η
    adapt_rate_x: float | None = None  # that of x; None: η

    paper: ClassVar[str] = (
        "Finn, Abbeel, Levine: Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, "
        "ICML 2017"
    )
    second_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapt_steps < 1:
            raise ValueError(f"adapt_steps must be at least 1, got {self.adapt_steps}")
        for name in ("adapt_rate", "adapt_rate_x"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be positive, got {rate}")

    @property
    def trained(self) -> tuple[Level, ...]:
        return ("x", "y")

    @property
    def works_together(self) -> bool:
        """Whether clients of one submodel can be asked as one: as long as their x is the same."""
        return self.num_inner_steps == 1

    def seen(self, problem: Any) -> ClientProblem:
        """One y from which all tasks of a client start, so that its gradient is theirs together."""
        return problem.with_one_copy_each()

    def loss(self, problem: Any, at: Weights, batch: Batch, local: Local) -> Tensor:
        copies, num_tasks = problem.copies, len(leaves(batch.inner)[0])
        alone = problem.with_copies(1)

        def of_task(y: Params, support: Any, query: Any) -> Tensor:
            w, part = self._adapted(alone, {"x": at["x"], "y": y}, support), _alone(query)
            return alone.outer(alone.features(w["x"], part), w["y"], part)

        start = at["y"] if copies > 1 else {k: v.unsqueeze(0) for k, v in at["y"].items()}
        start = {k: v.repeat_interleave(num_tasks // copies, dim=0) for k, v in start.items()}
        return copies * vmap(of_task)(start, batch.inner, batch.outer).mean()

    def predict(
        self, problem: ClientProblem, x: Params, y: Params, support: Any, query: Any
    ) -> Tensor:
        own = self.seen(problem)

        def of_task(support: Any, query: Any) -> Tensor:
            w = self._adapted(own, {"x": x, "y": y}, support)
            return own.call(w["y"], own.features(w["x"], _alone(query))).squeeze(0)

        return vmap(of_task, chunk_size=CHUNK)(support, query)

    def _adapted(self, problem: ClientProblem, at: Weights, support: Any) -> Any:
        part = _alone(support)

        def inner(w: Any) -> Tensor:
            return problem.inner(problem.features(w["x"], part), w["y"], part)

        here: Any = {level: dict(params) for level, params in at.items()}
        of_x = self.adapt_rate if self.adapt_rate_x is None else self.adapt_rate_x
        rates = {"x": of_x, "y": self.adapt_rate}
        for _ in range(self.adapt_steps):
            slopes = grad(inner)(here)
            here = {
                level: {k: v - rates[level] * slopes[level][k] for k, v in params.items()}
                for level, params in here.items()
            }
        return here


def _alone(part: Any) -> Any:
    """Return one task as a batch of tasks."""
    return map_leaves(lambda t: t.unsqueeze(0), part)
