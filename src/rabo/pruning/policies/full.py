"""Every client trains everything."""

from dataclasses import dataclass

from torch import Generator

from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Full(MaskPolicy):
    """Keep all units, whatever the capacity."""

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        return whole.everything()
