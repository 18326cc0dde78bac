"""A window that moves by one channel a round (FedRolex)."""

from dataclasses import dataclass

import torch
from torch import Generator

from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Rolling(MaskPolicy):
    """Round q keeps units q, q+1, ... modulo the size of the group."""

    shared = True

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        units = whole.channels.units
        return whole.take({g: (torch.arange(n) + round) % n for g, n in units.items()}, width)
