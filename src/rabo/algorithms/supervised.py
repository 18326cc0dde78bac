"""Ordinary training on labelled data, with or without the outer level."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from rabo.algorithms.single_level import Level, SingleLevel, Weights
from rabo.bilevel import Batch, BilevelProblem, features_of
from rabo.masks import Full
from rabo.runtimes.base import Local
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class Supervised(SingleLevel):
    """Local SGD on g, or on the mean of g and f.

    With `levels="y"` the loss is g and x stays where it starts: in loss tuning, the untuned loss.
    With `levels="both"` x and y are one network, trained on the mean of g and f: all data are used,
    the two levels are not.
    """

    levels: Literal["both", "y"] = "y"

    own_policy: ClassVar[type | None] = None  # of algorithms that are what their masks are

    def __post_init__(self) -> None:
        if self.levels not in ("both", "y"):
            raise ValueError(f"levels must be both or y, got {self.levels!r}")
        super().__post_init__()
        if self.own_policy and not isinstance(self.policy, (self.own_policy, Full)):
            raise ValueError(
                f"{type(self).__name__} keeps what {self.own_policy.__name__}() keeps, got policy "
                f"{self.policy!r}; fedavg takes any policy"
            )

    @property
    def trained(self) -> tuple[Level, ...]:
        return ("x", "y") if self.levels == "both" else ("y",)

    def loss(self, problem: BilevelProblem, at: Weights, batch: Batch, local: Local) -> Tensor:
        x, y = at["x"], at["y"]
        if self.levels == "y":
            z = _fixed_features(problem, x, batch, local)
            return problem.inner(z, y, batch.inner)
        of_inner, of_outer = features_of(problem, x, batch)
        inner = problem.inner(of_inner, y, batch.inner)
        outer = problem.outer(of_outer, y, batch.outer)
        return (inner + outer) / 2


def _fixed_features(problem: BilevelProblem, x: Params, batch: Batch, local: Local) -> Any:
    """Return z(x) of an x that stays: the same data serve all steps."""
    if "z" not in local.memory or local.memory["data"] is not batch.inner:
        local.memory.update(data=batch.inner, z=problem.features(x, batch.inner))
    return local.memory["z"]
