"""Other channels for every client and round."""

from dataclasses import dataclass

import torch
from torch import Generator

from rabo.pruning.policies.policy import MaskPolicy, Whole
from rabo.pruning.submodel import Cut


@dataclass(frozen=True)
class Random(MaskPolicy):
    """Keep a random choice of units, drawn from the stream of the client and round."""

    shared = False

    def __call__(
        self, whole: Whole, width: float, client: int, round: int, generator: Generator
    ) -> Cut:
        units = whole.channels.units
        return whole.take(
            {g: torch.randperm(n, generator=generator) for g, n in units.items()}, width
        )
