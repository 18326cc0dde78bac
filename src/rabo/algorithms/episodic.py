"""What algorithms for few-shot tasks need of a problem, and what they give to its judge."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from rabo.algorithms.single_level import SingleLevel
from rabo.exchange.state import State
from rabo.problems.bilevel import BilevelProblem
from rabo.problems.problem import ClientProblem
from rabo.pruning.policies import Full, MaskPolicy
from rabo.tree import Params


@dataclass(frozen=True, kw_only=True)
class Episodic(SingleLevel):
    """Trains on tasks as they will be met: parts of a batch are (inputs, labels) of some tasks."""

    policy: MaskPolicy = field(default_factory=Full)  # as published

    beta: float | Callable[[int], float] | Literal["auto"] = 0.1

    kind: ClassVar[str] = "single level, full model"
    is_episodic: ClassVar[bool] = True
    needs_outer: ClassVar[bool] = True

    def init(self, problem: BilevelProblem) -> State:
        if not getattr(problem, "ways", 0):
            raise ValueError(
                f"{type(self).__name__} learns from few-shot tasks, support and query drawings "
                "with labels, which this problem has not; it is for the task few-shot"
            )
        return super().init(problem)

    @abstractmethod
    def predict(
        self, problem: ClientProblem, x: Params, y: Params, support: Any, query: Any
    ) -> Tensor:
        """Return the scores of all classes for the queries of every task."""
