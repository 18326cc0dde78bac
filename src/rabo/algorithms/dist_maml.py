"""Dist-MAML: a start from which all parameters adapt to a task, averaged over clients."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from rabo.algorithms.episodic import Episodic
from rabo.algorithms.single_level import Level, Weights
from rabo.exchange.client import ClientContext
from rabo.problems.bilevel import Batch
from rabo.problems.problem import ClientProblem
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
    def separable(self) -> bool:
        """Whether clients of one submodel can be asked as one: as long as their x is the same."""
        alone = self.clip_gradients is not None or self.weight_decay > 0  # of each client's own x
        return self.num_inner_steps == 1 and not alone

    def seen(self, problem: Any) -> ClientProblem:
        """One y from which all tasks of a client start, so that its gradient is theirs together."""
        return problem.with_one_copy_each()

    def reported(self, problem: Any, loss: Tensor) -> Tensor:
        return loss.detach() / problem.copies

    def loss(self, problem: Any, at: Weights, batch: Batch, client: ClientContext) -> Tensor:
        copies, num_tasks = problem.copies, len(leaves(batch.inner)[0])
        alone = problem.with_copies(1)

        def outer(w: Any, query: Any) -> Tensor:
            part = _alone(query)
            return alone.outer(alone.features(w["x"], part), w["y"], part)

        y = at["y"] if copies > 1 else {k: v.unsqueeze(0) for k, v in at["y"].items()}
        y = {k: v.repeat_interleave(num_tasks // copies, dim=0) for k, v in y.items()}
        w = self._adapted(alone, {"x": _for_each(num_tasks, at["x"]), "y": y}, batch.inner)
        return copies * vmap(outer)(w, batch.outer).mean()

    def predict(
        self, problem: ClientProblem, x: Params, y: Params, support: Any, query: Any
    ) -> Tensor:
        own, number = self.seen(problem), len(leaves(support)[0])

        def scores(w: Any, query: Any) -> Tensor:
            return own.call(w["y"], own.features(w["x"], _alone(query))).squeeze(0)

        def of_some(support: Any, query: Any) -> Tensor:
            number = len(leaves(support)[0])
            at: Weights = {"x": _for_each(number, x), "y": _for_each(number, y)}
            return vmap(scores)(self._adapted(own, at, support), query)

        parts = [slice(start, start + CHUNK) for start in range(0, number, CHUNK)]
        return torch.cat([of_some(_some(support, p), _some(query, p)) for p in parts])

    def _adapted(self, problem: ClientProblem, at: Weights, support: Any) -> Any:
        """Take the steps of all tasks, each from its own weights, which lead over tasks.

        Slopes are those of the sum over tasks: in grad(vmap(...)), torch's norms have right slopes
        of slopes, in vmap(grad(...)) not.
        """

        def inner(w: Any, support: Any) -> Tensor:
            part = _alone(support)
            return problem.inner(problem.features(w["x"], part), w["y"], part)

        def total(w: Any) -> Tensor:
            return vmap(inner)(w, support).sum()

        here: Any = {level: dict(params) for level, params in at.items()}
        of_x = self.adapt_rate if self.adapt_rate_x is None else self.adapt_rate_x
        rates = {"x": of_x, "y": self.adapt_rate}
        for _ in range(self.adapt_steps):
            slopes = grad(total)(here)
            here = {
                level: {k: v - rates[level] * slopes[level][k] for k, v in params.items()}
                for level, params in here.items()
            }
        return here


def _for_each(number: int, params: Params) -> Params:
    """Return parameters with a leading dimension over tasks, which all have the same."""
    return {k: v.expand(number, *v.shape) for k, v in params.items()}


def _some(part: Any, which: slice) -> Any:
    """Return some tasks of a batch."""
    return map_leaves(lambda t: t[which], part)


def _alone(part: Any) -> Any:
    """Return one task as a batch of tasks."""
    return map_leaves(lambda t: t.unsqueeze(0), part)
