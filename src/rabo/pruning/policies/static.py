"""Always the first channels (HeteroFL)."""

from dataclasses import dataclass

import torch
from torch import Generator

from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Static(MaskPolicy):
    """Keep the first ⌈width·n⌉ units of every group, in every round."""

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        return whole.take({g: torch.arange(n) for g, n in whole.channels.units.items()}, width)
