"""Ordinary training on labelled data, with or without the outer level."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from rabo.algorithms.single_level import Level, Rows, SingleLevel, Weights
from rabo.exchange.client import ClientContext
from rabo.exchange.state import State
from rabo.problems.bilevel import Batch, BilevelProblem, features_of
from rabo.problems.labels import MaskedLogits
from rabo.pruning.policies import Full
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class Supervised(SingleLevel):
    """Local SGD on the one loss of a problem, on the mean of g and f, or on g alone.

    With `levels="both"` x and y are one network, trained on the loss of the problem. A bilevel
    problem has two losses: their mean uses all data. With `levels="y"` the loss is g and x stays
    where it starts.

    A problem that gives `labels=` also takes the options of the released HeteroFL code:
    `mask_logits="zero"` sets the logits of labels that a client does not have to zero; "exclude"
    takes them out of the softmax. With `average_by_label=True` only the clients that have a label
    are averaged in its row of the classifier.
    """

    levels: Literal["both", "y"] = "both"
    mask_logits: MaskedLogits = "none"
    average_by_label: bool = False

    own_policy: ClassVar[type | None] = None  # of algorithms that are what their masks are

    def __post_init__(self) -> None:
        if self.levels not in ("both", "y"):
            raise ValueError(f"levels must be both or y, got {self.levels!r}")
        if self.mask_logits not in ("none", "zero", "exclude"):
            raise ValueError(f"mask_logits must be none, zero or exclude, got {self.mask_logits!r}")
        super().__post_init__()
        if self.own_policy and not isinstance(self.policy, (self.own_policy, Full)):
            raise ValueError(
                f"{type(self).__name__} keeps what {self.own_policy.__name__}() keeps, got policy "
                f"{self.policy!r}; fedavg takes any policy"
            )

    def init(self, problem: BilevelProblem) -> State:
        knows_labels = getattr(problem, "knows_labels", False)
        if not knows_labels and (self.mask_logits != "none" or self.average_by_label):
            raise ValueError(
                "mask_logits and average_by_label need to know the labels of a client; give "
                "Problem(labels=...), a function from its data to their labels"
            )
        return super().init(problem)

    def seen(self, problem: Any) -> BilevelProblem:
        return (
            problem if self.mask_logits == "none" else problem.with_masked_logits(self.mask_logits)
        )

    def rows_of(self, problem: Any) -> Rows:
        return {"y": problem.label_rows()} if self.average_by_label else {}

    @property
    def trained(self) -> tuple[Level, ...]:
        return ("x", "y") if self.levels == "both" else ("y",)

    def loss(
        self, problem: BilevelProblem, at: Weights, batch: Batch, client: ClientContext
    ) -> Tensor:
        x, y = at["x"], at["y"]
        if self.levels == "y":
            z = _fixed_features(problem, x, batch, client)
            return problem.inner(z, y, batch.inner)
        if getattr(problem, "has_one_loss", False):
            return problem.inner(problem.features(x, batch.inner), y, batch.inner)
        of_inner, of_outer = features_of(problem, x, batch)
        inner = problem.inner(of_inner, y, batch.inner)
        outer = problem.outer(of_outer, y, batch.outer)
        return (inner + outer) / 2


def _fixed_features(problem: BilevelProblem, x: Params, batch: Batch, client: ClientContext) -> Any:
    """Return z(x) of an x that stays: the same data serve all steps."""
    cache = client.cache
    if "z" not in cache or cache["data"] is not batch.inner:
        cache.update(data=batch.inner, z=problem.features(x, batch.inner))
    return cache["z"]
