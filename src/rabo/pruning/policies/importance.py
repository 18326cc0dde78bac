"""The paper's policy: split by weight importance, each client takes what fits."""

from dataclasses import dataclass

from torch import Generator

from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Importance(MaskPolicy):
    """Keep the units with the largest weights (squared norm over all coupled tensors)."""

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        return whole.take(whole.by_importance, width)
